"""The judge finds what it is there to find: each verdict is given once wrongly and once rightly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest

from kvstore.client.messages import Event
from kvstore.core.errors import NotFound, Unavailable
from kvstore.core.types import Address, BlockId, Entry
from tests.chaos.judge import HANG_SLACK_S, LATE_S, Pauses, Row, Verdict, deadline_s, judge, recovery_s, unlike_journal
from tests.chaos.limits import MAY_REMEMBER_S
from tests.chaos.record import MISS, OK, UNTYPED, WRONG, Call

OWNER: Final = "sync.2"
OTHER: Final = "async.5"
NAME: Final = "w2/7"
REMEMBERED_S: Final = MAY_REMEMBER_S["async"]


def call(verb: str, turn: int, at_s: float, outcome: str = OK, *, actor: str = OWNER, **more: Any) -> Call:
    """One that takes 0.1 s."""
    place = actor.partition(".")[0]
    made = Call(actor, place, verb, NAME, turn, at_s, at_s + 0.1, outcome, length_bytes=1000 + turn)
    return made._replace(**more)


def published(turn: int, path: str = f"load/{NAME}") -> Event:
    return Event(turn, 0, "publish", path, "", 100 + turn, Address(BlockId(1, turn), 1000 + turn, 0))


def entry(length_bytes: int) -> Entry:
    address = Address(BlockId(1, length_bytes), length_bytes, 0)
    return Entry(100, 0o100644, 0, 0, length_bytes, 0, 0, address)


def told(kind: str, path: str = f"load/{NAME}", to_path: str = "") -> Event:
    return Event(1, 0, kind, path, to_path, 100, None)


def judged(*calls: Call, events: Sequence[Event] = (), pauses: Pauses | None = None) -> Verdict:
    return judge(calls, events, "load/", MAY_REMEMBER_S, pauses or {})


def test_the_newest_acknowledged_version_is_right() -> None:
    assert judged(call("put", 1, 0), call("put", 2, 1), call("get", 2, 2)).wrong == []


def test_an_older_version_than_the_acknowledged_one_is_wrong_for_its_owner_at_once() -> None:
    (line,) = judged(call("put", 1, 0), call("put", 2, 1), call("get", 1, 2)).wrong
    assert "read turn 1" in line
    assert "turn 2 (put)" in line


def test_others_may_remember_an_older_version_for_a_while_and_no_longer() -> None:
    puts = (call("put", 1, 0), call("put", 2, 1))
    soon, later = 1.2 + REMEMBERED_S / 2, 1.2 + REMEMBERED_S
    assert judged(*puts, call("get", 1, soon, actor=OTHER)).wrong == []
    assert len(judged(*puts, call("get", 1, later, actor=OTHER)).wrong) == 1


def test_what_was_removed_does_not_come_back() -> None:
    changes = (call("put", 1, 0), call("remove", 2, 1))
    assert judged(*changes, call("get", 0, 2, MISS)).wrong == []
    assert len(judged(*changes, call("get", 1, 2)).wrong) == 1


def test_a_rename_brings_its_version_and_takes_the_one_before() -> None:
    changes = (
        call("put", 1, 0),
        call("put", 2, 1, name="w2/fresh2"),
        call("rename", 2, 2, name="w2/fresh2", target=NAME),
    )
    assert judged(*changes, call("get", 2, 3)).wrong == []
    assert len(judged(*changes, call("get", 1, 3)).wrong) == 1
    assert len(judged(*changes, call("get", 2, 3, name="w2/fresh2")).wrong) == 1


def test_a_change_that_failed_may_have_happened_also_late_but_not_for_ever() -> None:
    failed, acknowledged = call("put", 1, 0, "Timeout.timeout"), call("put", 2, 1)
    assert judged(failed, call("get", 1, 1)).wrong == []
    late = judged(failed, acknowledged, call("get", 1, 2))
    assert (late.wrong, late.late) == ([], 1)
    far = call("put", 2, LATE_S + 1)
    assert len(judged(failed, far, call("get", 1, LATE_S + 2)).wrong) == 1


def test_what_nobody_had_written_is_wrong() -> None:
    assert len(judged(call("put", 1, 0), call("get", 9, 1)).wrong) == 1
    assert len(judged(call("get", 1, 1), call("put", 1, 5)).wrong) == 1


def test_bytes_that_are_no_version_are_wrong() -> None:
    assert len(judged(call("get", 0, 0, f"{WRONG}: key 2007: 12 bytes are no version")).wrong) == 1


def test_an_error_without_a_type_is_told() -> None:
    assert len(judged(call("get", 0, 0, f"{UNTYPED}: KeyError('x')")).untyped) == 1


@pytest.mark.parametrize("verb", ["put", "get", "stat"])
def test_a_call_hangs_beyond_its_deadline_and_a_little(verb: str) -> None:
    made = call(verb, 1, 10.0)
    limit_s = deadline_s(made) + HANG_SLACK_S
    assert judged(made._replace(end_s=10.0 + limit_s)).hangs == []
    assert len(judged(made._replace(end_s=10.1 + limit_s)).hangs) == 1


def test_time_in_which_nobody_could_answer_a_mount_does_not_count() -> None:
    made = call("stat", 1, 10.0, actor="b.2")
    made = made._replace(end_s=10.1 + deadline_s(made) + HANG_SLACK_S)
    assert judged(made, pauses={"b": [(11.0, 12.0)]}).hangs == []
    assert len(judged(made, pauses={"a": [(11.0, 12.0)], "b": [(30.0, 40.0)]}).hangs) == 1


def test_each_acknowledged_put_stands_in_the_journal_with_its_length() -> None:
    puts = (call("put", 1, 0), call("put", 2, 1), call("put", 3, 2, "Timeout.timeout"))
    assert judged(*puts, events=(published(1), published(2))).lost == []
    assert len(judged(*puts, events=(published(1), published(3))).lost) == 1
    assert len(judged(*puts, events=(published(1), published(2, "load/w2/8"))).lost) == 1


def test_each_acknowledged_rename_and_remove_stands_in_the_journal() -> None:
    rename = call("rename", 1, 0, name="w2/fresh1", target=NAME)
    assert judged(rename, events=(told("rename", "load/w2/fresh1", f"load/{NAME}"),)).lost == []
    assert len(judged(rename, events=(told("rename", "load/w2/fresh1", "load/w2/8"),)).lost) == 1
    removes = (call("remove", 1, 0), call("remove", 2, 1))
    assert judged(*removes, events=(told("remove"), told("remove"))).lost == []
    assert len(judged(*removes, events=(told("remove"),)).lost) == 1


def test_names_are_what_the_journal_says() -> None:
    events = [
        published(1, "load/put"),
        published(2, "load/renamed from"),
        told("rename", "load/renamed from", "load/renamed to")._replace(sequence=3),
        published(4, "load/removed"),
        told("remove", "load/removed")._replace(sequence=5),
        published(6, "load/evicted"),
        told("evict", "load/evicted")._replace(sequence=7),
        published(9, "load/later"),
    ]
    gone, hidden = NotFound(reason="no_name"), NotFound(reason="no_replica")
    right: dict[str, Row] = {
        "load/put": entry(1001),
        "load/renamed from": gone,
        "load/renamed to": entry(1002),
        "load/removed": gone,
        "load/evicted": gone,
        "load/later": gone,
    }
    assert unlike_journal(events, 8, right) == []
    assert unlike_journal(events, 8, dict.fromkeys(right, hidden)) == []
    wrong: list[tuple[str, Row]] = [
        ("put", gone),
        ("put", entry(1002)),
        ("put", Unavailable()),
        ("renamed from", entry(1002)),
        ("renamed to", gone),
        ("removed", entry(1004)),
        ("evicted", entry(1006)),
    ]
    for name, row in wrong:
        assert len(unlike_journal(events, 8, right | {f"load/{name}": row})) == 1, name


def test_a_recovery_is_timed_from_the_end_of_the_fault() -> None:
    hits = [call("get", 1, at / 10) for at in range(50)]
    none = [call("get", 0, 5 + at / 10, MISS) for at in range(40)]
    again = [call("get", 1, 9 + at / 10) for at in range(30)]
    recovered_s = recovery_s([*hits, *none, *again], 5.0, 7.0)
    assert recovered_s == pytest.approx(2.0, abs=0.5)
    assert recovery_s([*hits, *none], 5.0, 7.0) == -1.0
    assert recovery_s(none, 5.0, 7.0) is None
