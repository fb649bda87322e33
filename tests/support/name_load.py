"""Concurrent changes of names against a real master, each writer in a directory of its own, with a model of what must
be there: the state after the last acknowledged change, or that with the change in flight done as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvstore.core.errors import KvError, NotFound, Unavailable, from_wire
from kvstore.core.limits import MAX_BATCH
from kvstore.core.types import Entry
from kvstore.pb import common_pb2 as c
from kvstore.pb import master_pb2 as m
from kvstore.rpc import entries, methods
from kvstore.rpc.link import AsyncLink

NODE, BOOT, VOLUME = "n", 7, 1
WAIT_S: Final = 30.0
NAMES: Final = 12
"""Files a directory: they come again and again."""

State = Mapping[str, int]
"""Name → the counter of its block; of a directory, its TTL in seconds, 0 without one, as a negative number."""


def registration(**other: Any) -> m.RegisterRequest:
    volumes = [c.Volume(id=VOLUME, tier="ssd", capacity_bytes=1 << 40)]
    return m.RegisterRequest(**dict[str, Any](node=NODE, boot=BOOT, endpoint="h:1", volumes=volumes) | other)


def published(path: str, counter: int) -> m.PublishName:
    address = c.Address(boot=BOOT, counter=counter, length_bytes=5, hash=counter)
    return m.PublishName(path=path, address=address, volume=VOLUME)


class Writer:
    """`acknowledged` counts; `by_verb` says of which kind."""

    def __init__(self, index: int) -> None:
        self.directory = f"w{index}"
        self.acknowledged = 0
        self.by_verb: dict[str, int] = {}
        self.state: State = {}
        self.maybe: State | None = None
        """What the state is when the change in flight has happened."""
        self._dice = random.Random(index)
        self._counter = index << 32

    async def run(self, link: AsyncLink, on_acknowledged: Callable[[], None]) -> None:
        """Until the master is gone."""
        while True:
            verb, call, after = self._next(link)
            self.maybe = after
            try:
                await call
            except Unavailable:
                return
            self.state, self.maybe = after, None
            self.acknowledged += 1
            self.by_verb[verb] = self.by_verb.get(verb, 0) + 1
            on_acknowledged()

    async def check(self, link: AsyncLink) -> None:
        """What is there is one of the two, and is what the writer goes on from."""
        found = await self._read(link)
        differs = [sorted(found.items() ^ state.items()) for state in (self.state, self.maybe) if state is not None]
        assert [] in differs, f"{self.directory}: differs by {differs[0]}, with the change in flight by {differs[1:]}"
        self.state, self.maybe = found, None

    def _next(self, link: AsyncLink) -> tuple[str, Any, State]:
        """(verb, the call, the state after it)"""
        files = sorted(name for name, value in self.state.items() if value > 0)
        directories = sorted(self.state.keys() - files)
        verbs = ["publish", "publish"]
        verbs += ["remove", "rename"] if files else []
        verbs += ["mkdir"] if len(directories) < NAMES else []
        verbs += ["policy"] if directories else []
        verb = self._dice.choice(verbs)
        target = {"publish": [""], "mkdir": [""], "policy": directories}.get(verb, files)
        return (verb, *getattr(self, f"_{verb}")(link, self._dice.choice(target)))

    def _publish(self, link: AsyncLink, _: str) -> tuple[Any, State]:
        """One to five files in one transaction: all or none."""
        after = dict(self.state)
        for name in self._dice.sample(range(NAMES), self._dice.randint(1, 5)):
            self._counter += 1
            after[f"f{name}"] = self._counter
        new = {name: value for name, value in after.items() if value != self.state.get(name)}
        names = [published(self._path(name), value) for name, value in new.items()]
        request = m.PublishRequest(transactions=[m.Transaction(names=names, parents=True)])
        return _done(link, methods.PUBLISH, request), after

    def _remove(self, link: AsyncLink, name: str) -> tuple[Any, State]:
        request = m.RemoveRequest(names=[m.RemoveName(path=self._path(name))])
        return _done(link, methods.REMOVE, request), {n: v for n, v in self.state.items() if n != name}

    def _rename(self, link: AsyncLink, name: str) -> tuple[Any, State]:
        to = f"f{self._dice.randrange(NAMES)}"
        request = m.RenameRequest(names=[m.RenameName(from_path=self._path(name), to_path=self._path(to))])
        after = {n: v for n, v in self.state.items() if n != name} | {to: self.state[name]}
        return _done(link, methods.RENAME, request), after

    def _mkdir(self, link: AsyncLink, _: str) -> tuple[Any, State]:
        self._counter += 1
        name = f"d{self._counter}"
        request = m.MkdirRequest(paths=[self._path(name)], parents=True)
        return _done(link, methods.MKDIR, request), {**self.state, name: 0}

    def _policy(self, link: AsyncLink, name: str) -> tuple[Any, State]:
        ttl_s = self._dice.randint(1000, 2000)
        request = m.SetPolicyRequest(path=self._path(name), ttl_s=ttl_s)
        return _done(link, methods.SET_POLICY, request), {**self.state, name: -ttl_s}

    def _path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    async def _read(self, link: AsyncLink) -> State:
        policies = (await link.call(methods.LIST_POLICIES, m.ListPoliciesRequest(), WAIT_S)).policies
        ttls = {policy.inode: int(policy.ttl_s) for policy in policies}
        found: dict[str, int] = {}
        with contextlib.suppress(NotFound):  # before its first change there is no directory
            async for page in link.stream(methods.LIST, m.ListRequest(path=self.directory), WAIT_S):
                for name, row in zip(page.names, entries.decode(page.entries), strict=True):
                    assert isinstance(row, Entry)
                    found[name] = -ttls.get(row.inode, 0) if row.address is None else row.address.block.counter
        return found


async def _done(link: AsyncLink, method: methods.Method[Any, Any], request: Any) -> None:
    """Raises KvError when any part of it failed."""
    reply = await link.call(method, request, WAIT_S)
    errors = [result.error for result in getattr(reply, "results", [])] or list(getattr(reply, "errors", []))
    codes = [error.code for error in errors]
    if method is methods.MKDIR:
        codes = list(reply.entries.code)
    if any(codes):
        raise KvError(f"{method.path} {request}: {reply}")


async def register(link: AsyncLink) -> None:
    """The worker that holds all blocks. Again while there is no connection: on a busy machine that may take long."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                await link.call(methods.REGISTER, registration(), WAIT_S)
                return
            except Unavailable:
                await asyncio.sleep(0.1)


async def publish_one(link: AsyncLink, path: str, counter: int) -> None:
    """Raises KvError: what the master says, or what it says of the transaction."""
    request = m.PublishRequest(transactions=[m.Transaction(names=[published(path, counter)], parents=True)])
    error = (await link.call(methods.PUBLISH, request, WAIT_S)).results[0].error
    if error.code:
        raise from_wire(error.code, error.message)


async def publish_until(
    link: AsyncLink, prefix: str, acknowledged: dict[str, int], kind: type[KvError], first: int = 1 << 40
) -> KvError:
    """The error of this kind that ends it. `first`: counter of the first block."""
    async with asyncio.timeout(60):
        while True:
            counter = first + len(acknowledged)
            try:
                await publish_one(link, f"{prefix}/{counter}", counter)
            except kind as error:
                return error
            acknowledged[f"{prefix}/{counter}"] = counter


async def lookup_all(link: AsyncLink, paths: Sequence[str]) -> list[Entry]:
    """Fails where one is missing."""
    rows: list[entries.Row] = []
    for at in range(0, len(paths), MAX_BATCH):
        request = m.LookupRequest(paths=paths[at : at + MAX_BATCH])
        rows += entries.decode((await link.call(methods.LOOKUP, request, WAIT_S)).entries)
    found = [row for row in rows if isinstance(row, Entry)]
    assert len(found) == len(paths)
    return found
