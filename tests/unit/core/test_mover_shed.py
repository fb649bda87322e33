"""Room for somebody who waits on one volume."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import mover
from kvstore.core.mover import MAX_MOVES, Eviction, Move, Plan, Resident, Space, Tier

SSD, HDD, OTHER = 2, 3, 4
PLENTY = 1 << 40


def space(volume: int, used: int, capacity: int = 100) -> Space:
    return Space(volume, capacity, used, capacity, capacity * 9 // 10)


def blocks(first: int, count: int, size: int = 10) -> list[Resident[int]]:
    """From the coldest up."""
    return [Resident(first + i, size, float(i)) for i in range(count)]


def shed(
    tiers: Sequence[Tier], coldest: dict[int, list[Resident[int]]], need: int, limit: int = PLENTY, volume: int = SSD
) -> Plan[int]:
    return mover.shed(tiers, coldest, volume, need, limit)


def two(ssd_used: int, *hdd: Space) -> list[Tier]:
    return [Tier("mem", []), Tier("ssd", [space(SSD, ssd_used)]), Tier("hdd", hdd)]


def test_the_coldest_go_down_and_no_more_than_needed() -> None:
    found = shed(two(100, space(HDD, 0)), {SSD: blocks(0, 10)}, 15)
    assert found == Plan([], [Move(0, 10, SSD, HDD), Move(1, 10, SSD, HDD)])


def test_a_volume_that_has_room_below_its_watermark_gives_all_the_same() -> None:
    assert len(shed(two(50, space(HDD, 0)), {SSD: blocks(0, 5)}, 30).moves) == 3


def test_the_last_tier_makes_room_by_evicting() -> None:
    found = shed(two(100, space(HDD, 95)), {SSD: blocks(0, 10), HDD: blocks(20, 9)}, 20)
    assert found.moves == [Move(0, 10, SSD, HDD), Move(1, 10, SSD, HDD)]
    assert found.evictions == [Eviction(20, 10, HDD), Eviction(21, 10, HDD)]


def test_a_volume_of_the_last_tier_evicts() -> None:
    found = shed(two(0, space(HDD, 95), space(OTHER, 50)), {HDD: blocks(20, 9)}, 15, volume=HDD)
    assert found == Plan([Eviction(20, 10, HDD), Eviction(21, 10, HDD)], [])


def test_what_cannot_go_stays_and_what_is_held_goes_last() -> None:
    mine = blocks(0, 6)
    mine[0] = mine[0]._replace(movable=False, evictable=False)
    mine[1] = mine[1]._replace(held=True)
    mine[2] = mine[2]._replace(evictable=False)  # pinned: it may sink
    assert [move.id for move in shed(two(60, space(HDD, 0)), {SSD: mine}, 20).moves] == [2, 3]
    assert [move.id for move in shed(two(60, space(HDD, 0)), {SSD: mine}, 60).moves] == [2, 3, 4, 5, 1]


def test_where_nothing_fits_below_nothing_is_planned() -> None:
    full = [each._replace(evictable=False) for each in blocks(20, 10)]
    assert shed(two(100, space(HDD, 100)), {SSD: blocks(0, 10), HDD: full}, 30) == Plan([], [])


def test_moves_are_bounded() -> None:
    many = {SSD: blocks(0, 100, 1)}
    assert len(shed(two(100, space(HDD, 0, 1000)), many, 100, limit=25).moves) == 25
    assert len(shed(two(100, space(HDD, 0, 1000)), many, 100).moves) == MAX_MOVES


def test_a_volume_out_of_service_is_left_alone() -> None:
    assert shed(two(100, space(HDD, 0)), {SSD: blocks(0, 10)}, 30, volume=99) == Plan([], [])
    assert shed([], {}, 30) == Plan([], [])


RESIDENT = st.tuples(st.integers(1, 30), st.booleans(), st.booleans(), st.booleans())


@given(
    st.lists(RESIDENT, max_size=12),
    st.lists(RESIDENT, max_size=12),
    st.integers(0, 200),
    st.integers(0, 60),
    st.integers(0, 100),
)
def test_no_volume_passes_its_capacity_and_nothing_goes_twice(
    upper: list[tuple[int, bool, bool, bool]],
    lower: list[tuple[int, bool, bool, bool]],
    need: int,
    spare: int,
    limit: int,
) -> None:
    def residents(first: int, rows: list[tuple[int, bool, bool, bool]]) -> list[Resident[int]]:
        return [
            Resident(first + i, size, float(i), held, movable, movable and not pinned)
            for i, (size, held, movable, pinned) in enumerate(rows)
        ]

    ssd, hdd = residents(0, upper), residents(100, lower)
    used = {volume: sum(each.size_bytes for each in there) for volume, there in ((SSD, ssd), (HDD, hdd))}
    capacity = used[HDD] + spare
    tiers = [Tier("ssd", [space(SSD, used[SSD], 1000)]), Tier("hdd", [space(HDD, used[HDD], capacity)])]
    found = mover.shed(tiers, {SSD: ssd, HDD: hdd}, SSD, need, limit)
    known = {each.id: each for each in (*ssd, *hdd)}
    gone = [each.id for each in found.evictions] + [each.id for each in found.moves]
    assert len(gone) == len(set(gone))
    assert all(known[each.id].evictable and each.volume == HDD for each in found.evictions)
    assert all(known[each.id].movable and (each.source, each.target) == (SSD, HDD) for each in found.moves)
    freed = sum(each.size_bytes for each in found.evictions if not known[each.id].held)
    moved = sum(each.size_bytes for each in found.moves)
    assert used[HDD] - freed + moved <= capacity or not found.moves
    assert len(found.moves) <= 1 or moved <= limit + found.moves[0].size_bytes
    assert need > 0 or not gone
    assert moved - (found.moves[-1].size_bytes if found.moves else 0) < max(need, 1)
