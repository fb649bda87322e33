from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvstore.core import mover
from kvstore.core.mover import Candidate, Eviction, Move, Plan, Resident, Space, Tier

MEM, SSD, HDD = 1, 2, 3
PLENTY = 1 << 40


def space(volume: int, used: int, capacity: int = 100, leaving: int = 0) -> Space:
    """High watermark 90 %, low 80 %."""
    return Space(volume, capacity, used, capacity * 9 // 10, capacity * 8 // 10, leaving)


def tiers(mem: Space, *ssd: Space) -> list[Tier]:
    return [Tier("mem", [mem]), Tier("ssd", ssd)]


def blocks(first: int, scores: Iterable[float], size: int = 10) -> list[Resident[int]]:
    return [Resident(first + i, size, score) for i, score in enumerate(sorted(scores))]


def plan(
    where: list[Tier], coldest: dict[int, list[Resident[int]]], *candidates: Candidate[int], limit: int = PLENTY
) -> Plan[int]:
    return mover.plan(where, coldest, candidates, limit)


def test_between_the_watermarks_nothing_happens() -> None:
    found = plan(tiers(space(MEM, 90), space(SSD, 90)), {MEM: blocks(0, range(9)), SSD: blocks(10, range(9))})
    assert found == Plan([], [])


def test_above_the_high_watermark_the_coldest_are_demoted_down_to_the_low_one() -> None:
    found = plan(tiers(space(MEM, 95), space(SSD, 0)), {MEM: blocks(0, range(9))})
    assert found == Plan([], [Move(0, 10, MEM, SSD), Move(1, 10, MEM, SSD)])


def test_what_is_on_its_way_out_is_not_replaced() -> None:
    found = plan(tiers(space(MEM, 95, leaving=15), space(SSD, 0)), {MEM: blocks(0, range(9))})
    assert found == Plan([], [])


def test_only_the_last_tier_evicts() -> None:
    found = plan(tiers(space(MEM, 50), space(SSD, 95)), {MEM: blocks(0, range(5)), SSD: blocks(10, range(9))})
    assert found == Plan([Eviction(10, 10, SSD), Eviction(11, 10, SSD)], [])


def test_a_full_last_tier_makes_room_for_what_is_demoted() -> None:
    where = tiers(space(MEM, 95), Space(SSD, 100, 100, 100, 100))
    found = plan(where, {MEM: blocks(0, range(9)), SSD: blocks(10, range(10))})
    assert found.evictions == [Eviction(10, 10, SSD), Eviction(11, 10, SSD)]
    assert found.moves == [Move(0, 10, MEM, SSD), Move(1, 10, MEM, SSD)]


def test_one_plan_brings_all_tiers_down_with_what_comes_from_above() -> None:
    found = plan(tiers(space(MEM, 95), space(SSD, 95)), {MEM: blocks(0, range(9)), SSD: blocks(10, range(9))})
    assert len(found.moves) == 2
    assert [eviction.id for eviction in found.evictions] == [10, 11, 12, 13]  # 95 + 20 - 40 bytes


def test_a_tier_is_demoted_to_the_volume_with_the_larger_free_share() -> None:
    found = plan(tiers(space(MEM, 95), space(SSD, 60), space(HDD, 500, 1000)), {MEM: blocks(0, range(9))})
    assert {move.target for move in found.moves} == {HDD}


def test_a_tier_without_volumes_in_service_is_skipped() -> None:
    where = [Tier("mem", [space(MEM, 95)]), Tier("ssd", []), Tier("hdd", [space(HDD, 0)])]
    assert plan(where, {MEM: blocks(0, range(9))}).moves[0] == Move(0, 10, MEM, HDD)
    alone = plan([Tier("mem", []), Tier("ssd", [space(SSD, 95)])], {SSD: blocks(0, range(9))})
    assert [eviction.id for eviction in alone.evictions] == [0, 1]
    assert plan([], {}) == Plan([], [])


def test_blocks_that_must_stay_are_left_and_held_ones_go_last() -> None:
    mine = blocks(0, range(9))
    mine[0] = mine[0]._replace(movable=False, evictable=False)
    mine[1] = mine[1]._replace(evictable=False)
    mine[2] = mine[2]._replace(held=True)
    evicted = plan([Tier("ssd", [space(SSD, 95)])], {SSD: mine})
    assert [eviction.id for eviction in evicted.evictions] == [3, 4]
    demoted = plan(tiers(space(MEM, 95), space(SSD, 0)), {MEM: mine})
    assert [move.id for move in demoted.moves] == [1, 3]


def test_a_pinned_block_can_be_demoted_but_a_pinned_tier_gives_nothing() -> None:
    pinned = [block._replace(evictable=False) for block in blocks(0, range(9))]
    assert plan([Tier("ssd", [space(SSD, 95)])], {SSD: pinned}) == Plan([], [])
    full = tiers(space(MEM, 95), Space(SSD, 100, 100, 100, 100))
    assert plan(full, {MEM: blocks(10, range(9)), SSD: pinned}) == Plan([], [])


def test_a_large_block_that_finds_no_room_does_not_keep_the_small_ones() -> None:
    mine = [Resident(0, 90, 0.0), *blocks(1, range(1, 9), size=1)]
    found = plan(tiers(space(MEM, 98), space(SSD, 50)), {MEM: mine})
    assert [move.id for move in found.moves] == list(range(1, 9))


def test_moves_are_bounded_in_bytes_and_number() -> None:
    mine = blocks(0, range(100), size=10)
    where = tiers(space(MEM, 1000, 1000), space(SSD, 0, 10_000))
    assert len(plan(where, {MEM: mine}, limit=45).moves) == 4
    assert len(plan(where, {MEM: mine}, limit=1).moves) == 1
    many = tiers(space(MEM, 10_000, 10_000), space(SSD, 0, 10_000))
    assert len(plan(many, {MEM: blocks(0, range(500))}).moves) == mover.MAX_MOVES


def candidate(score: float, touches: int = 2, volume: int = SSD, size: int = 10) -> Candidate[int]:
    return Candidate(Resident(99, size, score), volume, touches)


def test_while_there_is_room_the_first_touch_promotes() -> None:
    where = tiers(space(MEM, 70), space(SSD, 50))
    assert plan(where, {MEM: blocks(0, range(7))}, candidate(-5.0, touches=1)).moves == [Move(99, 10, SSD, MEM)]


@pytest.mark.parametrize(
    ("score", "touches", "is_promoted"),
    [
        (3.0 + mover.MARGIN, 2, False),  # not above the margin
        (3.1 + mover.MARGIN, 2, True),
        (9.0, 1, False),  # the first touch displaces nobody
    ],
)
def test_without_room_heat_and_a_second_touch_promote(score: float, touches: int, is_promoted: bool) -> None:
    where = tiers(space(MEM, 80), space(SSD, 50))
    found = plan(where, {MEM: blocks(0, range(3, 11))}, candidate(score, touches))
    assert found.moves == ([Move(99, 10, SSD, MEM)] if is_promoted else [])


def test_a_promotion_is_compared_with_those_that_will_go_for_it_not_with_those_spoken_for() -> None:
    where = tiers(space(MEM, 90), space(SSD, 50))  # 10 bytes above the low watermark: the coldest is spoken for
    mine = blocks(0, [0, 5, 6, 7, 8, 9, 10, 11, 12])
    assert plan(where, {MEM: mine}, candidate(4.9 + mover.MARGIN)).moves == []
    assert plan(where, {MEM: mine}, candidate(5.1 + mover.MARGIN)).moves == [Move(99, 10, SSD, MEM)]


def test_a_full_tier_demotes_first_and_then_receives() -> None:
    where = tiers(Space(MEM, 100, 100, 100, 100), space(SSD, 50))
    found = plan(where, {MEM: blocks(0, range(10)), SSD: [Resident(99, 10, 8.0)]}, candidate(8.0))
    assert found.moves == [Move(0, 10, MEM, SSD), Move(99, 10, SSD, MEM)]


def test_room_for_a_promotion_is_not_made_by_evicting_what_is_promoted() -> None:
    where = tiers(Space(MEM, 100, 100, 100, 100), Space(SSD, 100, 100, 100, 100))
    found = plan(
        where, {MEM: blocks(0, range(10)), SSD: [Resident(99, 10, 8.0), *blocks(10, range(9, 18))]}, candidate(8.0)
    )
    assert found.evictions == [Eviction(10, 10, SSD)]
    assert found.moves == [Move(0, 10, MEM, SSD), Move(99, 10, SSD, MEM)]


def test_what_somebody_holds_makes_no_room_yet() -> None:
    held = [block._replace(held=True) for block in blocks(0, range(10))]
    found = plan(tiers(Space(MEM, 100, 100, 100, 100), space(SSD, 50)), {MEM: held}, candidate(20.0))
    assert found.moves == [Move(0, 10, MEM, SSD)]
    full = tiers(space(MEM, 95), Space(SSD, 100, 100, 100, 100))
    assert plan(full, {MEM: blocks(20, range(9)), SSD: held}).moves == []


def test_a_block_rises_one_tier_at_a_time() -> None:
    where = [*tiers(space(MEM, 0), space(SSD, 0)), Tier("hdd", [space(HDD, 50)])]
    assert plan(where, {}, candidate(1.0, volume=HDD)).moves == [Move(99, 10, HDD, SSD)]
    assert plan(where, {}, candidate(1.0, volume=MEM)).moves == []
    assert plan(where, {}, candidate(1.0, volume=77)).moves == []  # its volume failed meanwhile


def test_a_fetched_block_displaces_only_colder_ones_of_the_fastest_tier() -> None:
    where, mine = tiers(space(MEM, 80), space(SSD, 50)), {MEM: blocks(0, range(8))}
    assert mover.place_fetched(where, mine, 10, 0.5) == MEM
    assert mover.place_fetched(where, mine, 10, 0.0) == SSD
    assert mover.place_fetched(where, mine, 30, 9.0) == SSD  # no room for it now
    assert mover.place_fetched(tiers(space(MEM, 0), space(SSD, 50)), {}, 10, -9.0) == MEM
    assert mover.place_fetched(where, mine, 70, 9.0) is None
    assert mover.place_fetched([Tier("ssd", [space(SSD, 90)])], {SSD: blocks(0, [9.0])}, 10, 0.0) == SSD
    assert mover.place_fetched([], {}, 10, 0.0) is None


def test_a_written_block_starts_on_the_fastest_disk_tier_with_room() -> None:
    where = [*tiers(space(MEM, 0), space(SSD, 95), space(SSD + 10, 50)), Tier("hdd", [space(HDD, 0)])]
    assert mover.place_written(where, 10) == SSD + 10
    assert mover.place_written(where, 60) == HDD
    assert mover.place_written(where, 101) is None
    assert mover.place_written([Tier("mem", [space(MEM, 0)])], 1) is None
