"""The mover and its accounting over many steps: scans, working sets, and whatever Hypothesis thinks of."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.core import mover
from kvstore.core.heat import Clock, Heat, Ranking
from kvstore.core.mover import Candidate, Plan, Resident, Space, Tier

MEM, SSD, HDD = 1, 2, 3
PLENTY = 1 << 40


def space(volume: int, used: int, capacity: int = 100, leaving: int = 0) -> Space:
    """High watermark 90 %, low 80 %."""
    return Space(volume, capacity, used, capacity * 9 // 10, capacity * 8 // 10, leaving)


class Worker:
    """A worker without a disk: what the mover says is done at once, and every step is checked."""

    def __init__(self, names: list[str], spaces: list[list[Space]]) -> None:
        self.tiers = [(name, [each.volume for each in level]) for name, level in zip(names, spaces, strict=True)]
        self.shape = {each.volume: each for level in spaces for each in level}
        self.used = dict.fromkeys(self.shape, 0)
        self.lingering = dict.fromkeys(self.shape, 0)
        self.ranking = {volume: Ranking[int]() for volume in self.shape}
        self.heat: dict[int, Heat] = {}
        self.size: dict[int, int] = {}
        self.volume: dict[int, int] = {}
        self.touches: dict[int, int] = {}
        self.held: set[int] = set()
        self.pinned: set[int] = set()
        self.shielded: set[int] = set()
        self.moves = self.evictions = 0
        self.clock = Clock(sum(each.capacity_bytes for each in self.shape.values()))
        self._ids = itertools.count()

    def now(self, reserved: dict[int, int] | None = None) -> list[Tier]:
        extra = reserved or {}
        return [
            Tier(
                name,
                [
                    self.shape[v]._replace(used_bytes=self.used[v] + extra.get(v, 0), leaving_bytes=self.lingering[v])
                    for v in volumes
                ],
            )
            for name, volumes in self.tiers
        ]

    def resident(self, id: int) -> Resident[int]:
        movable = id not in self.shielded
        return Resident(
            id, self.size[id], self.heat[id].score, id in self.held, movable, movable and id not in self.pinned
        )

    def coldest(self) -> dict[int, list[Resident[int]]]:
        return {
            volume: [self.resident(id) for id, _ in itertools.islice(ranking.coldest(), mover.WINDOW)]
            for volume, ranking in self.ranking.items()
        }

    def write(self, size: int) -> int | None:
        return self._admit(mover.place_written(self.now(), size), size)

    def fetch(self, size: int) -> int | None:
        return self._admit(mover.place_fetched(self.now(), self.coldest(), size, self.clock.now), size)

    def _admit(self, volume: int | None, size: int) -> int | None:
        if volume is None:
            return None
        id = next(self._ids)
        self.size[id], self.touches[id] = size, 0
        self.used[volume] += size
        self._put(id, volume, Heat(self.clock.now, False))
        self.clock.admit(size)
        return id

    def read(self, id: int) -> None:
        self._put(id, self.volume[id], self.heat[id].touched(self.clock.now))
        self.touches[id] += 1
        self.run([Candidate(self.resident(id), self.volume[id], self.touches[id])])

    def run(self, candidates: list[Candidate[int]] | None = None) -> Plan[int]:
        last = next(volumes for _, volumes in reversed(self.tiers) if volumes)
        found = mover.plan(self.now(), self.coldest(), candidates or [], PLENTY)
        ids = [each.id for each in found.evictions] + [each.id for each in found.moves]
        assert len(ids) == len(set(ids))
        for id, size, volume in found.evictions:
            assert volume in last
            assert id not in self.pinned | self.shielded
            self._leave(id, volume, size)
            for known in (self.heat, self.size, self.volume, self.touches):
                del known[id]
            self.evictions += 1
        for id, size, source, target in found.moves:
            assert id not in self.shielded
            self.used[target] += size
            assert self.used[target] <= self.shape[target].capacity_bytes
            self._leave(id, source, size)
            self._put(id, target, self.heat[id])
            self.touches[id] = 0
            self.moves += 1
        return found

    def let_go(self) -> None:
        """All readers close their files."""
        self.held.clear()
        for volume, size in self.lingering.items():
            self.used[volume] -= size
            self.lingering[volume] = 0

    def _leave(self, id: int, volume: int, size: int) -> None:
        assert self.volume[id] == volume
        assert self.size[id] == size
        self.ranking[volume].discard(id)
        if id in self.held:
            self.held.discard(id)
            self.lingering[volume] += size
        else:
            self.used[volume] -= size

    def _put(self, id: int, volume: int, heat: Heat) -> None:
        self.heat[id], self.volume[id] = heat, volume
        self.ranking[volume].set(id, heat.score)

    def check(self) -> None:
        """The books agree with what is there, to the byte."""
        for volume, ranking in self.ranking.items():
            here = {id for id, _ in ranking.coldest()}
            assert here == {id for id, where in self.volume.items() if where == volume}
            assert self.used[volume] == sum(self.size[id] for id in here) + self.lingering[volume]
            assert 0 <= self.used[volume] <= self.shape[volume].capacity_bytes


def warm(worker: Worker, count: int) -> list[int]:
    """Blocks of 10 bytes that were written and read three times."""
    hot = [id for _ in range(count) if (id := worker.write(10)) is not None]
    for _ in range(3):
        for id in hot:
            worker.read(id)
    assert len(hot) == count
    assert all(worker.volume[id] == MEM for id in hot)
    worker.moves = 0
    return hot


@pytest.mark.parametrize(("way", "reads"), [("fetch", 0), ("write", 0), ("write", 1)])
def test_a_scan_ten_times_the_tier_does_not_flush_the_hot_set(way: str, reads: int) -> None:
    worker = Worker(["mem", "ssd"], [[space(MEM, 0, 1000)], [space(SSD, 0, 10_000)]])
    hot = warm(worker, 70)
    for _ in range(1000):
        scan(worker, way, reads)
    worker.check()
    assert stayed(worker, hot)


def test_a_scan_that_reads_everything_twice_does_not_flush_a_hot_set_that_is_in_use() -> None:
    worker = Worker(["mem", "ssd"], [[space(MEM, 0, 1000)], [space(SSD, 0, 10_000)]])
    hot = warm(worker, 70)
    for number in range(1000):
        scan(worker, "write", reads=2)
        if number % 100 == 99:  # once for each tier's worth of the scan
            for id in hot:
                worker.read(id)
    worker.check()
    assert stayed(worker, hot)


def scan(worker: Worker, way: str, reads: int) -> None:
    id = worker.fetch(10) if way == "fetch" else worker.write(10)
    assert id is not None
    for _ in range(reads):
        worker.read(id)
    worker.run()


def stayed(worker: Worker, hot: list[int]) -> bool:
    """All of them are in mem, and none went down and came back meanwhile (that would have begun its count anew)."""
    return all(worker.volume.get(id) == MEM and worker.touches[id] >= 2 for id in hot)


def test_a_working_set_twice_the_tier_does_not_swap_to_and_fro() -> None:
    worker, chance = Worker(["mem", "ssd"], [[space(MEM, 0, 1000)], [space(SSD, 0, 10_000)]]), random.Random(1)
    ids = [id for _ in range(200) if (id := worker.write(10)) is not None]
    for id in ids * 2:
        worker.read(id)
    for _ in range(1000):
        worker.read(chance.choice(ids))
    worker.moves = 0
    for _ in range(4000):
        worker.read(chance.choice(ids))
    worker.check()
    assert worker.moves <= 40  # 1 % of the reads; without the margin 500


class MoverMachine(RuleBasedStateMachine):
    """Three tiers, one of two volumes, blocks of all sizes, and people who hold, pin and shield them."""

    def __init__(self) -> None:
        super().__init__()
        ssd = [space(SSD, 0, 200), space(SSD + 10, 0, 100)]
        self.worker = Worker(["mem", "ssd", "hdd"], [[space(MEM, 0, 100)], ssd, [space(HDD, 0, 300)]])

    def some(self, number: int) -> int:
        ids = sorted(self.worker.volume)
        return ids[number % len(ids)]

    @rule(size=st.integers(1, 60), is_fetch=st.booleans(), count=st.integers(1, 8))
    def come(self, size: int, is_fetch: bool, count: int) -> None:
        for _ in range(count):
            _ = self.worker.fetch(size) if is_fetch else self.worker.write(size)

    @precondition(lambda self: self.worker.volume)
    @rule(number=st.integers(0, 1000), times=st.integers(1, 4))
    def read(self, number: int, times: int) -> None:
        id = self.some(number)
        for _ in range(times):
            if id in self.worker.volume:
                self.worker.read(id)

    @precondition(lambda self: self.worker.volume)
    @rule(number=st.integers(0, 1000), what=st.sampled_from(["held", "pinned", "shielded"]))
    def keep(self, number: int, what: str) -> None:
        getattr(self.worker, what).add(self.some(number))

    @rule()
    def release(self) -> None:
        self.worker.pinned.clear()
        self.worker.shielded.clear()
        self.worker.let_go()

    @rule()
    def run(self) -> None:
        self.worker.run()

    @invariant()
    def the_books_agree(self) -> None:
        self.worker.check()

    def teardown(self) -> None:
        """When nobody keeps anything the mover comes to rest, with no volume above its high watermark."""
        self.release()
        for _ in range(100):
            if self.worker.run() == Plan([], []):
                break
        else:
            pytest.fail("the mover does not come to rest")
        self.worker.check()
        for volume, shape in self.worker.shape.items():
            assert self.worker.used[volume] <= shape.high_bytes


TestMover = MoverMachine.TestCase
TestMover.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
