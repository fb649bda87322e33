"""Puts that should have worked are told from those that may fail: each way once rightly and once wrongly."""

from __future__ import annotations

import pytest

from tests.chaos.excuses import MOST_FAILED, MOST_UNEXCUSED, NOTHING, NOTICED_S, SETTLED_S, excuses, puts_of
from tests.chaos.nemesis import Deed
from tests.chaos.record import OK, Call

FAULT_S, BACK_S = 10.0, 22.0
FAILED = "NotAsked.unavailable"


def put(at_s: float, outcome: str = FAILED, *, place: str = "sync", took_s: float = 0.1) -> Call:
    return Call(f"{place}.1", place, "put", "w1/1", 1, at_s, at_s + took_s, outcome, 1000)


def deed(what: str, target: str, *, done: bool = True) -> Deed:
    return Deed(what, target, "", FAULT_S, 20.0, done, BACK_S)


@pytest.mark.parametrize(
    ("what", "target", "place"),
    [
        ("stop", "master", "sync"),
        ("rate", "master", "b"),
        ("blackout", "all", "a"),
        ("kill", "mount-a", "a"),
        ("stop fs", "mount-a", "a"),
        ("part", "node-1", "b"),
        ("delay", "proxy", "sync-far"),
    ],
)
def test_what_is_in_its_way_excuses_a_put_until_all_serve_again_and_a_little_longer(
    what: str, target: str, place: str
) -> None:
    fault = deed(what, target)
    for at_s in (FAULT_S + 0.1, 15.0, BACK_S + SETTLED_S - 0.1):
        assert excuses(fault, put(at_s, place=place)), at_s
    for at_s in (FAULT_S - 0.2, BACK_S + SETTLED_S + 0.1):
        assert not excuses(fault, put(at_s, place=place)), at_s
    assert not excuses(fault._replace(done=False), put(15.0, place=place)), "nothing was done"


@pytest.mark.parametrize(
    ("what", "target", "place"),
    [
        ("stop", "node-0", "sync"),
        ("kill", "node-1", "b"),
        ("part", "node-1", "a"),
        ("loss", "node-0", "sync"),
        ("kill", "mount-a", "b"),
        ("delay", "proxy", "sync"),
        ("fill", "node-1", "b"),
    ],
)
def test_what_is_not_in_its_way_excuses_only_what_it_interrupts(what: str, target: str, place: str) -> None:
    fault = deed(what, target)
    assert excuses(fault, put(FAULT_S - 0.5, place=place, took_s=1.0))
    assert excuses(fault, put(FAULT_S + NOTICED_S - 0.1, place=place))
    assert not excuses(fault, put(FAULT_S + NOTICED_S + 0.1, place=place))


def test_puts_are_counted_by_what_was_broken() -> None:
    deeds = [deed("stop", "master"), deed("kill", "node-2")]
    calls = [put(1.0), put(2.0, OK), put(12.5, OK), put(13.0), put(1.0)._replace(verb="get")]
    puts = puts_of(calls, deeds)
    assert (puts.puts, puts.failed, puts.due, puts.unexcused) == (4, 2, 2, [calls[0]])
    assert [tuple(row) for row in puts.rows] == [
        ("kill worker", 2, 1, 0),
        (NOTHING, 2, 1, 1),
        ("stop master", 2, 1, 0),
    ]


def test_more_failures_without_an_excuse_than_a_busy_machine_has_are_not_good() -> None:
    few = int(MOST_UNEXCUSED * 1000)
    right = [put(1.0, OK)] * (1000 - few)
    assert puts_of([*right, *[put(1.0)] * few], []).is_good
    assert not puts_of([*right, *[put(1.0)] * (few + 1)], []).is_good


def test_a_run_in_which_most_puts_fail_is_not_good_whatever_the_excuse() -> None:
    away = [deed("stop", "master")]
    for share, is_good in ((MOST_FAILED - 0.01, True), (MOST_FAILED + 0.01, False)):
        failed = int(share * 1000)
        calls = [*[put(15.0)] * failed, *[put(1.0, OK)] * (1000 - failed)]
        assert puts_of(calls, away).is_good is is_good
