"""What clients do all day: one call after the other over a few names, each watched by the oracle and a clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from kvstore.client.jobs import Put
from kvstore.core.errors import KvError
from kvstore.core.types import Entry
from tests.sim.faults import Violation
from tests.sim.ledger import Ledger
from tests.sim.loop import Process
from tests.sim.oracle import ABSENT, Oracle, Version
from tests.sim.programs import ClientHost
from tests.sim.trace import Trace

T = TypeVar("T")

NAMES: Final = ("a/1", "a/2", "a/3", "b/1", "b/2", "b/x/1", "b/x/2", "c/1", "c/x/1", "c/x/2")
DIRECTORIES: Final = ("b/x", "c/x", "b/y")
"""Those that are renamed; what is in the last one came there by such a rename."""
BELOW: Final = ("1", "2")
SIZES: Final = (8, 100, 4096, 5000, 20_000, 60_000)
LATE_S: Final = 0.25
"""Beyond its deadline no call may take longer than this."""
OP_TIMEOUT_S: Final = 4.0


class Watch:
    """What calls came to, in numbers; and the first violation that a client met."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.violation: Violation | None = None

    def fail(self, error: Violation) -> None:
        self.violation = self.violation or error


class User:
    """One task of one client."""

    def __init__(self, host: ClientHost, oracle: Oracle, ledger: Ledger, trace: Trace, watch: Watch) -> None:
        self._host, self._client = host, host.client
        self._oracle, self._ledger, self._trace, self._watch = oracle, ledger, trace, watch
        self._random = host.random
        self.busy_since_s: float | None = None
        self.doing = ""

    @property
    def process(self) -> Process:
        assert self._host.process is not None
        return self._host.process

    async def run(self, until_s: float) -> None:
        verbs: Sequence[tuple[Callable[[], Awaitable[str]], int]] = (
            (self._put, 30), (self._put_absent, 12), (self._get, 30), (self._get_many, 10),
            (self._remove, 8), (self._rename, 8), (self._rename_directory, 3), (self._list, 4), (self._quota, 2),
        )  # fmt: skip
        choices, weights = zip(*verbs, strict=True)
        while self._now_s < until_s:
            (verb,) = self._random.choices(choices, weights)
            try:
                await self._watched(verb)
            except Violation as error:
                self._trace.add(f"VIOLATION {error}")
                self._watch.fail(error)
                return
            await asyncio.sleep(self._random.expovariate(5.0))

    async def check_all(self) -> None:
        """Read every name once, in peace."""
        for name in NAMES:
            await self._read(name)

    @property
    def _now_s(self) -> float:
        return self._host.loop.time()

    async def _watched(self, verb: Callable[[], Awaitable[str]]) -> None:
        self.busy_since_s, self.doing = self._now_s, verb.__name__
        outcome = await verb()
        took_s, self.busy_since_s = self._now_s - self.busy_since_s, None
        self._watch.outcomes[f"{verb.__name__.strip('_')} {outcome}"] += 1
        if took_s > self._deadline_s:
            raise Violation(f"{self._host.name}: {self.doing} took {took_s:.3f} s, its deadline is {OP_TIMEOUT_S} s")

    def check_in_time(self, grace_s: float) -> None:
        if self.busy_since_s is not None and self._now_s - self.busy_since_s > self._deadline_s + grace_s:
            raise Violation(f"{self._host.name}: {self.doing} has not come back, its deadline is {OP_TIMEOUT_S} s")

    @property
    def _deadline_s(self) -> float:
        """A list may bring nothing for so long, once before it begins and once before its only page."""
        return (2 if self.doing == "_list" else 1) * OP_TIMEOUT_S + LATE_S

    def _name(self) -> str:
        return self._random.choice(NAMES)

    def _say(self, text: str) -> None:
        self._trace.add(f"{self._host.name} {text}")

    async def _told(self, call: Awaitable[T], what: str) -> T | KvError:
        self._say(what)
        try:
            result = await call
        except KvError as error:
            self._say(f"{what}: {type(error).__name__} {error.reason}")
            return error
        self._say(f"{what}: done")
        return result

    # ---- verbs

    async def _put(self) -> str:
        return await self._store(self._name(), if_absent=False)

    async def _put_absent(self) -> str:
        return await self._store(self._name(), if_absent=True)

    async def _store(self, name: str, *, if_absent: bool) -> str:
        version = self._oracle.new_version(self._random.choice(SIZES))
        what = f"put {name} v{version.number} of {len(version.data)}{' if absent' if if_absent else ''}"
        attempt = self._oracle.begin(name, {version.number}, self._now_s)
        put = await self._told(
            self._client.put(name, version.data, if_absent=if_absent, timeout_s=OP_TIMEOUT_S), what
        )  # fmt: skip
        if isinstance(put, KvError):
            return type(put).__name__
        if not put.created:
            if not if_absent:
                self._oracle.acknowledge(attempt, self._now_s)
            self._check_entry(name, put.entry, attempt.start_s)
            return "there already"
        self._oracle.acknowledge(attempt, self._now_s)
        self._check_put(name, put, version, if_absent, attempt.start_s)
        return "created"

    def _check_put(self, name: str, put: Put, version: Version, if_absent: bool, began_s: float) -> None:
        self._ledger.check_published(put.entry.inode, f"v{version.number}", name, began_s)
        if if_absent:
            self._ledger.check_fresh(put.entry.inode, name)
        address = put.entry.address
        if address is None or (address.length_bytes, address.hash) != (len(version.data), version.hash):
            raise Violation(f"{name}: v{version.number} was published as {address}", [name])

    def _check_entry(self, name: str, entry: Entry, since_s: float) -> None:
        if entry.address is None or entry.is_dir:
            return
        number = self._oracle.number_of(entry.address.length_bytes, entry.address.hash)
        if number is None:
            raise Violation(f"{name}: names block {entry.address}, which nobody wrote", [name])
        self._oracle.check_version(name, number, since_s, self._now_s)

    async def _get(self) -> str:
        return await self._read(self._name())

    async def _read(self, name: str) -> str:
        since_s = self._now_s
        data = await self._told(self._client.get(name, timeout_s=OP_TIMEOUT_S), f"get {name}")
        if isinstance(data, KvError):
            return type(data).__name__
        number = self._oracle.check_bytes(name, data, since_s - self._host.ttl_s, self._now_s)
        self._say(f"get {name}: v{number}")
        return "hit"

    async def _get_many(self) -> str:
        names = self._random.sample(NAMES, 4)
        since_s = self._now_s
        found = await self._told(self._client.get_many(names, timeout_s=OP_TIMEOUT_S), f"get {' '.join(names)}")
        if isinstance(found, KvError):
            return type(found).__name__
        for name, data in zip(names, found, strict=True):
            if data is not None:
                number = self._oracle.check_bytes(name, data, since_s - self._host.ttl_s, self._now_s)
                self._say(f"get {name}: v{number}")
        return f"{sum(data is not None for data in found)} of 4"

    async def _remove(self) -> str:
        name = self._name()
        attempt = self._oracle.begin(name, {ABSENT}, self._now_s)
        error = await self._told(self._client.remove(name, timeout_s=OP_TIMEOUT_S), f"remove {name}")
        if isinstance(error, KvError):
            return type(error).__name__
        self._oracle.acknowledge(attempt, self._now_s)
        self._check_durable(name)
        return "removed"

    async def _rename(self) -> str:
        name, to = self._random.sample(NAMES, 2)
        departure, arrival = self._oracle.begin_move(name, to, self._now_s)
        error = await self._told(self._client.rename(name, to, timeout_s=OP_TIMEOUT_S), f"rename {name} {to}")
        self._oracle.end_move(arrival)
        if isinstance(error, KvError):
            return type(error).__name__
        self._oracle.acknowledge(departure, self._now_s)
        self._oracle.acknowledge(arrival, self._now_s)
        self._check_durable(name)
        self._check_durable(to)
        return "renamed"

    async def _rename_directory(self) -> str:
        """All that is below moves in one step; what was below the target is nothing, or the call fails."""
        source, target = self._random.sample(DIRECTORIES, 2)
        moves = [self._oracle.begin_move(f"{source}/{file}", f"{target}/{file}", self._now_s) for file in BELOW]
        call = self._client.rename(source, target, timeout_s=OP_TIMEOUT_S)
        error = await self._told(call, f"rename {source}/ {target}/")
        for departure, arrival in moves:
            self._oracle.end_move(arrival)
            if not isinstance(error, KvError):
                self._oracle.acknowledge(departure, self._now_s)
                self._oracle.acknowledge(arrival, self._now_s)
        if isinstance(error, KvError):
            return type(error).__name__
        check_durable(self._ledger, self._oracle, NAMES, self._now_s)
        return "renamed"

    async def _list(self) -> str:
        directory, since_s = self._random.choice(("a", "b", "c")), self._now_s
        self._say(f"list {directory}")
        try:
            async for name, entry in self._client.list(directory, timeout_s=OP_TIMEOUT_S):
                self._check_entry(f"{directory}/{name}", entry, since_s)
        except KvError as error:
            return type(error).__name__
        return "listed"

    async def _quota(self) -> str:
        quota = self._random.choice((0, 0, 50_000, 500_000))
        call = self._client.set_policy("a", quota_bytes=quota, timeout_s=OP_TIMEOUT_S)
        result = await self._told(call, f"quota a {quota}")
        return type(result).__name__ if isinstance(result, KvError) else "set"

    def _check_durable(self, name: str) -> None:
        check_durable(self._ledger, self._oracle, [name], self._now_s)


def check_durable(ledger: Ledger, oracle: Oracle, names: Sequence[str], now_s: float) -> None:
    """What these names hold in the durable state is nothing that was over before."""
    files = ledger.durable_files()
    for name in names:
        row = files.get(name)
        if row is not None and row.block:
            number = oracle.number_of(row.length_bytes, row.hash)
            if number is None:
                raise Violation(f"{name}: names a block that nobody wrote", [name])
            oracle.check_version(name, number, now_s, now_s)
