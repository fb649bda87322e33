"""A whole master in the test's process: real verbs, a database in memory, a clock that only moves when told to."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar

from kvstore.core.errors import KvError
from kvstore.core.told import VolumeState, WorkerCounters
from kvstore.core.types import Address, BlockId, Entry
from kvstore.master.master import Master, Settings
from kvstore.master.namespace.policies import Wanted
from kvstore.master.namespace.publish import Mode, Name, Published, Transaction
from kvstore.master.namespace.quotas import Held
from kvstore.master.namespace.remove import Kind
from kvstore.master.namespace.rename import Move
from kvstore.master.namespace.setpolicy import Holding
from kvstore.master.recovery.rebuild import Wanted as Rebuilding
from kvstore.master.storage.commit import Committer
from kvstore.master.storage.db import Cf, Db, MemoryDb
from kvstore.master.storage.records import (
    BLOCK,
    COUNTERS,
    INODE,
    META_COUNTERS,
    NAME,
    POLICY,
    BlockRow,
    InodeRow,
    NameRow,
    pack_u64,
    replica_key,
    unpack_u64,
)
from kvstore.master.workers.nodes import Node
from kvstore.master.workers.orders import Answer, Orders
from kvstore.master.workers.reports import Full, Report
from kvstore.master.workers.told import Beat, Registration
from kvstore.rpc.server import stop_all

P = ParamSpec("P")
T = TypeVar("T")
GIB = 1 << 30
DEFAULT = Settings()


class StillRuntime:
    """Threads run at once, time stands still until a test moves it. No two of them draw the same number."""

    _random = itertools.count(1)

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self.now_s = 100.0

    def wall_ns(self) -> int:
        return self.now_ns

    def monotonic_s(self) -> float:
        return self.now_s

    def random_u64(self) -> int:
        return next(self._random)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(0)

    async def in_thread(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    def close(self) -> None:
        pass


def volume(id: int, capacity: int = GIB) -> VolumeState:
    return VolumeState(id, "ssd", capacity, 0, capacity)


def address(counter: int, boot: int = 7, length: int = 10, digest: int | None = None) -> Address:
    return Address(BlockId(boot, counter), length, counter if digest is None else digest)


class World:
    """`master` with the verbs of a test in short. Node ``n<i>`` has volume i, boot 7 × i and listens at ``h<i>:1``."""

    def __init__(self, db: Db, settings: Settings = DEFAULT, wanted: Rebuilding | None = None) -> None:
        self.db = db
        self.runtime = StillRuntime()
        self.free = 10 * GIB
        self.committer = Committer(db, self.runtime, lambda: self.free, GIB)
        self.master = Master(db, self.committer, self.runtime, settings, wanted)
        self._numbers: dict[str, int] = {}

    async def join(self, i: int = 1, volumes: Sequence[int | VolumeState] | None = None, **other: object) -> Node:
        states = [volume(v) if isinstance(v, int) else v for v in (volumes or [i])]
        registration = Registration(f"n{i}", 7 * i, f"h{i}:1", "", "", "", 0, states, "0", {7 * i: 0})
        return await self.master.register(registration._replace(**other))  # type: ignore[arg-type]

    async def beat(self, i: int = 1, volumes: Sequence[int] | None = None, *, leaving: bool = False) -> Orders:
        states = [volume(v) for v in ([i] if volumes is None else volumes)]
        return await self.master.heartbeat(Beat(f"n{i}", 7 * i, states, WorkerCounters(), 0, leaving))

    async def policy(self, path: str, base: int = 0, **wanted: Any) -> Holding:
        return await self.master.set_policy(base, path, Wanted(**wanted))

    async def beat_with(self, i: int = 1, *, held: Mapping[int, int], coldest: float = 1.0, version: int = 0) -> Orders:
        """A heartbeat of a worker that holds so many bytes of each policy."""
        policies = {policy: Held(size, coldest) for policy, size in held.items()}
        beat = Beat(f"n{i}", 7 * i, [volume(i)], WorkerCounters(), 0, policies=policies, policies_version=version)
        return await self.master.heartbeat(beat)

    def recount(self) -> None:
        while self.master.recount():
            pass

    async def report(
        self, i: int = 1, *, held: Sequence[tuple[Address, int]] = (), nowhere: Sequence[Address] = (),
        dead: Sequence[Address] = (), full: Full | None = None, fence: int = 1 << 40, number: int | None = None,
        digest: int | None = None, named: Sequence[Address] = (),
    ) -> Answer:  # fmt: skip
        node = self.master.nodes.get(f"n{i}")
        expected = node.row.next_report if node else 1
        number = expected if number is None else number
        report = Report(
            f"n{i}", 7 * i, number, number if digest is None else digest, {7 * i: fence},
            [(a.block.pack(), v) for a, v in held], [a.block.pack() for a in nowhere],
            [a.block.pack() for a in dead], full, [a.block.pack() for a in named],
        )  # fmt: skip
        return await self.master.report(report)

    async def put(
        self, path: str, block: Address | None, volume: int = 1, *, mode: Mode = Mode.REPLACE, base: int = 0,
        parents: bool = False, name: Mapping[str, object] | None = None,
    ) -> Published:  # fmt: skip
        names = [Name(path, block, volume)._replace(**(name or {}))]  # type: ignore[arg-type]
        [result] = await self.master.publish(base, [Transaction(mode, names, parents)])
        if isinstance(result, KvError):
            raise result
        return result[0]

    async def mkdir(self, path: str, *, base: int = 0, parents: bool = False, mode: int = 0) -> Entry:
        return _raise((await self.master.mkdir(base, [path], parents, mode, 0, 0))[0])

    async def remove(self, path: str, kind: Kind = Kind.ANY, inode: int = 0, base: int = 0) -> None:
        _raise((await self.master.remove(base, [(path, kind, inode)]))[0])

    async def rename(self, source: str, target: str, *, no_replace: bool = False, inode: int = 0) -> None:
        _raise((await self.master.rename([Move(0, source, 0, target, no_replace, inode)]))[0])

    def stat(self, path: str, base: int = 0, node: str = "") -> Entry:
        return _raise(self.master.lookup(base, [path], node)[0])

    async def names(self, path: str = "", **options: object) -> list[str]:
        arguments = {"after": "", "limit": 0, "names_only": False} | options
        pages = self.master.list(0, path, **arguments)  # type: ignore[arg-type]
        return [name async for names, _ in pages for name in names]

    def die(self) -> None:
        """Every node that does not beat meanwhile dies."""
        for _ in range(self.master.settings.dead_ticks):
            self.master.tick()


def _raise(result: T | KvError) -> T:
    if isinstance(result, KvError):
        raise result
    return result


@asynccontextmanager
async def running(
    db: Db | None = None, settings: Settings = DEFAULT, wanted: Rebuilding | None = None
) -> AsyncIterator[World]:
    """A world whose commits are flushed; its database is checked at the end."""
    world = World(db or MemoryDb(), settings, wanted)
    task = asyncio.create_task(world.committer.run())
    try:
        yield world
        check_invariants(world.db)
    finally:
        world.committer.close()
        await stop_all(task)


def check_invariants(db: Db) -> None:
    """The columns say the same thing: names ⇄ inodes, names → blocks, blocks ⇄ replicas, dead ⇄ unlinks and graves."""
    everything = 1 << 40
    names = {k: NAME.load(v) for k, v in db.scan(Cf.NAMES, b"", None, everything)}
    inodes = {k: INODE.load(v) for k, v in db.scan(Cf.INODES, b"", None, everything)}
    rows = {k: BLOCK.load(v) for k, v in db.scan(Cf.BLOCKS, b"", None, everything)}
    assert {pack_u64(row.inode): key for key, row in names.items()} == {
        key: pack_u64(at.parent) + at.name.encode() for key, at in inodes.items()
    }
    directories = {0} | {row.inode for row in names.values() if row.is_dir}
    assert {int.from_bytes(key[:8], "big") for key in names} <= directories
    owned = {row.block: row.inode for row in names.values() if row.block}
    assert owned == {block: row.inode for block, row in rows.items() if not row.dead}
    assert len(owned) == sum(1 for row in names.values() if row.block), "one block, one owner"
    pairs = {replica_key(v, block) for block, row in rows.items() for v in row.volumes}
    orders = {replica_key(v, block) for block, row in rows.items() if row.dead for v in row.volumes}
    assert keys(db, Cf.REPLICAS) == pairs
    assert keys(db, Cf.UNLINKS) == orders
    check_policies(db, names, inodes, rows)
    assert keys(db, Cf.GRAVES) == {block for block, row in rows.items() if row.dead and not row.volumes}


def check_policies(
    db: Db, names: Mapping[bytes, NameRow], inodes: Mapping[bytes, InodeRow], rows: Mapping[bytes, BlockRow]
) -> None:
    """Each policy has counted exactly the blocks whose rows name it, or one below it."""
    told = {unpack_u64(k): POLICY.load(v) for k, v in db.scan(Cf.POLICIES, b"", None, 1 << 40)}
    own = {at.policy: unpack_u64(key) for key, at in inodes.items() if at.policy}
    assert own == {id: row.inode for id, row in told.items() if row.inode}
    counted = {id: [0, 0] for id in told}
    lengths = {row.block: row.length_bytes for row in names.values() if row.block}
    for block, row in rows.items():
        at = 0 if row.dead else row.policy
        assert not row.policy or row.dead or row.length_bytes == lengths[block]
        while at:
            counted[at][0] += row.length_bytes
            counted[at][1] += 1
            at = told[at].parent
    assert {id: [row.used_bytes, row.files] for id, row in told.items()} == counted
    stored = db.get(Cf.META, META_COUNTERS)
    assert stored is None or COUNTERS.load(stored).policies == len(told)


def keys(db: Db, cf: Cf) -> set[bytes]:
    return {key for key, _ in db.scan(cf, b"", None, 1 << 40)}
