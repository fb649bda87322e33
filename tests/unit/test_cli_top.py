"""``kvstore top`` and the tables of ``report``: rates from maps, what is shown, how it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import pytest
from rich.text import Text

from kvstore.cli import report_cmd, top_cmd
from kvstore.cli.rates import Rates, tiers
from kvstore.cli.top_cmd import Looks
from kvstore.client.messages import ClusterMap, Node
from kvstore.core.errors import Denied, KvError, Timeout, Unavailable
from kvstore.core.told import TierCounters, Unlinked, VolumeState, WorkerCounters

GIB = 1 << 30
MIB = 1 << 20


def node(
    name: str = "a", *, hits: int = 0, misses: int = 0, age_s: float = 0.0, live: bool = True, **other: object
) -> Node:
    """With an ssd that took all hits, and the counters of `other`: read_bytes, promotions, unlinked."""
    counters = WorkerCounters(hits, misses, 0, 0, 0, int(str(other.get("read_bytes", 0))), 0, 0)
    unlinked = other.get("unlinked", {})
    assert isinstance(unlinked, dict)
    told = TierCounters(
        "ssd",
        blocks=7,
        hits=hits,
        promotions=int(str(other.get("promotions", 0))),
        unlinked=tuple(Unlinked(reason, files, files * MIB) for reason, files in unlinked.items()),
    )
    volumes = (VolumeState(1, "ssd", 4 * GIB, GIB, 3 * GIB), VolumeState(2, "ssd", 4 * GIB, GIB, 3 * GIB))
    return Node(name, f"{name}:1", "", live, age_s, volumes, counters, 7, False, "1", (told,))


def cluster(*nodes: Node, found: int = 0, not_found: int = 0) -> ClusterMap:
    return ClusterMap("c", 1, nodes, 12, 3, "1", GIB, found, not_found)


class TestRates:
    def test_there_are_none_before_the_second_heartbeat(self) -> None:
        rates = Rates()
        rates.add(cluster(node(hits=100)), 10.0)
        assert rates.of(node()) is None
        assert rates.lookups is None

    def test_time_is_that_between_heartbeats_not_between_maps(self) -> None:
        rates = Rates()
        rates.add(cluster(node(hits=100, age_s=0.9)), 10.0)  # heard at 9.1
        rates.add(cluster(node(hits=130, misses=10, read_bytes=6 * MIB, age_s=0.1)), 11.2)  # heard at 11.1
        found = rates.of(node())
        assert found is not None
        assert found.hits_s == pytest.approx(15)
        assert found.misses_s == pytest.approx(5)
        assert found.hit_ratio == pytest.approx(0.75)
        assert found.read_bytes_s == pytest.approx(3 * MIB)
        assert found.tiers["ssd"].hits_s == pytest.approx(15)
        assert found.tiers["ssd"].hit_ratio == pytest.approx(0.75)

    def test_a_heartbeat_that_is_seen_twice_changes_nothing(self) -> None:
        rates = Rates()
        rates.add(cluster(node(hits=0)), 10.0)
        rates.add(cluster(node(hits=20)), 11.0)
        before = rates.of(node())
        rates.add(cluster(node(hits=20, age_s=0.501)), 11.5)
        assert rates.of(node()) is before
        rates.add(cluster(node(hits=20)), 12.0)
        after = rates.of(node())
        assert after is not None
        assert (after.hits_s, after.hit_ratio, after.tiers["ssd"].hit_ratio) == (0, None, None)

    def test_reasons_that_did_not_occur_are_left_out(self) -> None:
        rates = Rates()
        rates.add(cluster(node(unlinked={"capacity": 5})), 10.0)
        rates.add(cluster(node(unlinked={"capacity": 5, "ttl": 4}, promotions=6)), 12.0)
        found = rates.of(node())
        assert found is not None
        assert found.tiers["ssd"].unlinked_s == {"ttl": 2.0}
        assert found.tiers["ssd"].promotions_s == 3.0

    @pytest.mark.parametrize("restarted", [node(hits=8), node(hits=108), node(hits=8, unlinked={"ttl": 1})])
    def test_a_worker_that_started_anew_counts_from_zero(self, restarted: Node) -> None:
        rates = Rates()
        rates.add(cluster(node(hits=100, unlinked={"capacity": 1})), 10.0)
        rates.add(cluster(restarted), 11.0)
        found = rates.of(node())
        assert found is not None
        assert found.hits_s == restarted.counters.hits

    def test_a_dead_node_has_none_and_begins_anew(self) -> None:
        rates = Rates()
        rates.add(cluster(node(hits=0)), 10.0)
        rates.add(cluster(node(hits=5)), 11.0)
        rates.add(cluster(node(hits=5, live=False)), 12.0)
        assert rates.of(node()) is None
        rates.add(cluster(node(hits=50)), 13.0)
        assert rates.of(node()) is None
        rates.add(cluster(node(hits=60)), 14.0)
        found = rates.of(node())
        assert found is not None
        assert found.hits_s == 10

    def test_look_ups_of_a_master_and_of_one_that_started_anew(self) -> None:
        rates = Rates()
        for at_s, found, not_found in ((0, 100, 100), (2, 106, 102), (3, 1, 3), (4, 1, 3)):
            rates.add(cluster(found=found, not_found=not_found), at_s)
            if at_s == 2:
                assert rates.lookups == (4.0, 0.75)
            if at_s == 3:
                assert rates.lookups == (4.0, 0.25)
        assert rates.lookups == (0.0, None)

    def test_tiers_come_fastest_first_also_untold_and_unknown_ones(self) -> None:
        volumes = tuple(VolumeState(i, tier, 4, 3, 1) for i, tier in enumerate(("tape", "hdd", "mem", "hdd")))
        found = tiers(node()._replace(volumes=volumes, tiers=(TierCounters("hdd", hits=3),)))
        assert [(t.counters.tier, t.capacity_bytes, t.counters.hits) for t in found] == [
            ("mem", 4, 0),
            ("hdd", 8, 3),
            ("tape", 4, 0),
        ]


class Fake:
    """A master that answers or fails in turn, a screen, and a person who leaves after `patience` waits."""

    def __init__(self, answers: Sequence[ClusterMap | KvError], patience: int = 1000) -> None:
        self.answers, self.patience = list(answers), patience
        self.shown: list[str] = []
        self.waits: list[float] = []
        self.now_s = 0.0
        self.looks = Looks(self.ask, lambda text: self.shown.append(text.plain), self.wait, lambda: self.now_s)

    def ask(self) -> ClusterMap:
        self.now_s += 0.25
        answer = self.answers.pop(0)
        if isinstance(answer, KvError):
            raise answer
        return answer

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now_s += seconds
        return len(self.waits) >= self.patience


class TestLooks:
    def test_so_many_at_the_interval(self) -> None:
        fake = Fake([cluster(node(hits=2 * i)) for i in range(3)])
        fake.looks.run(2.0, 3)
        assert fake.waits == [1.75, 1.75], "asking takes a part of the interval"
        assert ["1.0" in text for text in fake.shown] == [False, True, True]

    def test_until_the_person_leaves(self) -> None:
        fake = Fake([cluster(node())] * 9, patience=4)
        fake.looks.run(1.0, None)
        assert len(fake.shown) == 4

    def test_a_master_that_is_away_is_a_line_and_comes_back(self) -> None:
        fake = Fake([cluster(node()), Unavailable("m:1: refused"), Timeout("m:1: silent"), cluster(node())])
        fake.looks.run(1.0, 4)
        assert ["away" in text for text in fake.shown] == [False, True, True, False]
        assert "m:1: refused" in fake.shown[1]
        assert "12 files" in fake.shown[1], "what it said last stays"

    def test_a_master_that_was_never_there_is_the_error_in_the_end(self) -> None:
        fake = Fake([Unavailable("m:1: refused"), Timeout("m:1: silent")])
        with pytest.raises(Timeout, match="silent"):
            fake.looks.run(1.0, 2)
        assert len(fake.shown) == 2

    def test_what_does_not_pass_ends_it_at_once(self) -> None:
        with pytest.raises(Denied):
            Fake([Denied("another cluster")]).looks.run(1.0, None)

    def test_what_is_shown(self) -> None:
        rates = Rates()
        before, after = node(), node(hits=30, misses=10, read_bytes=5 * MIB, promotions=2, unlinked={"ttl": 3})
        rates.add(cluster(before, node("gone", live=False)), 10.0)
        last = cluster(after, node("gone", live=False), found=3, not_found=1)
        rates.add(last, 11.0)
        lines = top_cmd.screen(last, rates, 2.0, None).plain.splitlines()
        assert lines[1:3] == ["cluster c: 1 of 2 nodes live, 12 files", "look-ups 4.0/s, 75.0 % found"]
        cells = [line.split() for line in lines]
        assert ["a", "live", "30.0", "0.0", "10.0", "75.0", "%", "5.00", "MiB/s", "0", "B/s"] in cells
        assert ["gone", "dead"] in cells
        assert ["a", "ssd", "8.00", "GiB", "2.00", "GiB", "7", "30.0", "75.0", "%", "2.0", "0.0", "ttl", "3.0"] in cells
        assert max(map(len, lines)) <= 100


class TestReport:
    MANY = node("n" * 12, hits=1234567, misses=9, promotions=12345, unlinked=dict.fromkeys("abcde", 1234))

    def rows(self, *nodes: Node) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = report_cmd.summary(cluster(*nodes))["tiers"]
        return rows

    def test_everything_is_in_json(self) -> None:
        (row,) = json.loads(json.dumps(self.rows(self.MANY, node("dead", live=False))))
        assert {**row, "unlinked": row["unlinked"]["e"]} == {
            "node": "n" * 12, "tier": "ssd", "capacity_bytes": 8 * GIB, "used_bytes": 2 * GIB, "free_bytes": 6 * GIB,
            "blocks": 7, "hits": 1234567, "hit_ratio": 1234567 / 1234576, "promotions": 12345, "promoted_bytes": 0,
            "demotions": 0, "demoted_bytes": 0, "pinned_bytes": 0, "unpinned_bytes": 0,
            "unlinked": {"files": 1234, "bytes": 1234 * MIB},
        }  # fmt: skip

    def test_the_tables_fit_100_columns(self, capsys: pytest.CaptureFixture[str]) -> None:
        (row,) = self.rows(self.MANY)
        report_cmd.print_tiers([{**row, "demotions": 1234, "demoted_bytes": 999 * MIB}])
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 100
        assert [line for line in lines if "a 1,234 (1.21 GiB), b 1,234 (1.21 GiB), c 1,234 (1.21 GiB)" in line]
        assert [line for line in lines if line.endswith("d 1,234 (1.21 GiB), e 1,234 (1.21 GiB)")]
        assert not [line for line in lines if "PINNED" in line], "nothing is"

    def test_pins_show_when_there_are_any(self, capsys: pytest.CaptureFixture[str]) -> None:
        (row,) = self.rows(node())
        report_cmd.print_tiers([{**row, "pinned_bytes": GIB, "unpinned_bytes": MIB}])
        out = capsys.readouterr().out
        assert "PINNED  WITHOUT EFFECT" in out
        assert "UNLINKED" not in out
        assert out.split()[-5:] == ["ssd", "1.00", "GiB", "1.00", "MiB"]

    def test_before_any_heartbeat(self) -> None:
        (row,) = self.rows(node()._replace(tiers=()))
        assert (row["hits"], row["hit_ratio"], row["capacity_bytes"]) == (0, None, 8 * GIB)


def test_keys_are_heard() -> None:
    """Any key but q changes nothing; a keyboard that is gone ends it."""
    keyboard, fingers = os.pipe()
    try:
        assert not top_cmd._quit_pressed(keyboard, 0.0)
        for keys, quits in ((b"x\x1b[A", False), (b"q", True), (b"jQ", True)):
            os.write(fingers, keys)
            assert top_cmd._quit_pressed(keyboard, 0.0) is quits
        os.close(fingers)
        assert top_cmd._quit_pressed(keyboard, 0.0)
    finally:
        os.close(keyboard)


def test_lines_have_no_escape_codes_and_are_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    top_cmd._print_lines(Text("x" * 300, style="bold red"))
    assert capsys.readouterr().out == "x" * 300 + "\n\n"
