"""The namespace against a plain tree of dictionaries: any sequence of operations, the same outcome after each."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.core import errors
from kvstore.core.errors import KvError
from kvstore.master.namespace.publish import Mode
from kvstore.master.namespace.remove import Kind
from kvstore.master.storage.db import MemoryDb
from kvstore.master.workers.reports import Full
from kvstore.rpc.server import stop_all
from tests.unit.master.world import World, address, check_invariants

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
NODES = st.sampled_from([1, 2])
Tree = dict[str, Any]
"""Name → a directory (dict) or a file: (its content, the node that holds it; 0 = an empty file)."""


class Model:
    """What the namespace should do, for one reader: slow, small, and without blocks."""

    def __init__(self) -> None:
        self.root: Tree = {}
        self.live = {1, 2}

    def exists(self, item: Any) -> bool:
        return item is not None and (isinstance(item, dict) or item[1] in self.live | {0})

    def find(self, directory: Tree, name: str) -> Any:
        item = directory.get(name)
        return item if self.exists(item) else None

    def directory(self, parts: list[str], make: bool = False) -> Tree:
        at = self.root
        for name in parts:
            item = self.find(at, name)
            if item is None and make:
                item = at[name] = {}
            if item is None:
                raise errors.NotFound
            if not isinstance(item, dict):
                raise errors.NotDirectory
            at = item
        return at

    def place(self, path: str, make: bool = False) -> tuple[Tree, str]:
        *parts, name = path.split("/")
        return self.directory(parts, make), name

    def publish(self, path: str, content: int, node: int, mode: Mode, parents: bool) -> bool:
        directory, name = self.place(path, parents)
        stored, existing = directory.get(name), self.find(directory, name)
        if isinstance(stored, dict):
            raise errors.IsDirectory
        if existing is not None and (mode is Mode.IF_ABSENT or existing[0] == content):
            return False
        if mode is Mode.IF_PRESENT and stored is None:
            raise errors.Stale
        if node not in self.live | {0}:
            raise errors.Stale
        directory[name] = (content, node)
        return True

    def mkdir(self, path: str, parents: bool) -> None:
        directory, name = self.place(path, parents)
        existing = self.find(directory, name)
        if existing is None:
            directory[name] = {}
        elif not (parents and isinstance(existing, dict)):
            raise errors.AlreadyExists

    def remove(self, path: str, kind: Kind) -> None:
        directory, name = self.place(path)
        item = self.find(directory, name)
        if item is None:
            raise errors.NotFound
        is_dir = isinstance(item, dict)
        if kind is Kind.FILE and is_dir:
            raise errors.IsDirectory
        if kind is Kind.DIRECTORY and not is_dir:
            raise errors.NotDirectory
        self.check_empty(item)
        del directory[name]

    def check_empty(self, item: Any) -> None:
        if isinstance(item, dict) and any(self.exists(i) for i in item.values()):
            raise errors.NotEmpty

    def rename(self, source: str, target: str, no_replace: bool) -> None:
        (from_dir, from_name), (to_dir, to_name) = self.place(source), self.place(target)
        item, replaced = self.find(from_dir, from_name), self.find(to_dir, to_name)
        if item is None:
            raise errors.NotFound
        if no_replace and replaced is not None:
            raise errors.AlreadyExists
        if (from_dir, from_name) == (to_dir, to_name) and from_dir is to_dir:
            return
        if isinstance(item, dict) and f"{target}/".startswith(f"{source}/"):
            raise errors.InvalidRequest
        if replaced is not None and isinstance(item, dict) != isinstance(replaced, dict):
            raise errors.NotDirectory if isinstance(item, dict) else errors.IsDirectory
        self.check_empty(replaced)
        del from_dir[from_name]
        to_dir[to_name] = item

    def evict(self, node: int) -> None:
        """Everything on a node is gone for good."""
        self.prune(self.root, node)

    def prune(self, directory: Tree, node: int) -> None:
        for name, item in list(directory.items()):
            if isinstance(item, dict):
                self.prune(item, node)
            elif item[1] == node:
                del directory[name]

    def visible(self, directory: Tree) -> Tree:
        shown = {n: i for n, i in directory.items() if self.exists(i)}
        return {n: self.visible(i) if isinstance(i, dict) else i[0] for n, i in shown.items()}


class NamespaceMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.model = Model()
        self.world = World(MemoryDb())
        self.task = self.loop.create_task(self.world.committer.run())
        self.counter = 0
        for node in (1, 2):
            self.run(self.world.join(node))

    def run(self, what: Awaitable[Any]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(what, 10)

        return self.loop.run_until_complete(bounded())

    def both(self, real: Awaitable[Any], expected: Callable[[], Any]) -> None:
        """The same outcome, errors by their type."""
        before = copy.deepcopy(self.model.root)
        right = outcome(expected)
        if isinstance(right, type):  # an error: all or nothing
            self.model.root = before
        assert outcome(lambda: self.run(real)) == right

    @rule(path=PATHS, content=st.integers(1, 3), node=NODES, mode=st.sampled_from(Mode), parents=st.booleans())
    def publish(self, path: str, content: int, node: int, mode: Mode, parents: bool) -> None:
        self.counter += 1
        block = address(self.counter, boot=7 * node, digest=content)
        put = self.world.put(path, block, volume=node, mode=mode, parents=parents)
        self.both(created(put), lambda: self.model.publish(path, content, node, mode, parents))

    @rule(path=PATHS)
    def publish_empty(self, path: str) -> None:
        self.both(created(self.world.put(path, None)), lambda: self.model.publish(path, 0, 0, Mode.REPLACE, False))

    @rule(path=PATHS, parents=st.booleans())
    def mkdir(self, path: str, parents: bool) -> None:
        self.both(nothing(self.world.mkdir(path, parents=parents)), lambda: self.model.mkdir(path, parents))

    @rule(path=PATHS, kind=st.sampled_from(Kind))
    def remove(self, path: str, kind: Kind) -> None:
        self.both(self.world.remove(path, kind), lambda: self.model.remove(path, kind))

    @rule(source=PATHS, to=PATHS, no_replace=st.booleans())
    def rename(self, source: str, to: str, no_replace: bool) -> None:
        self.both(
            self.world.rename(source, to, no_replace=no_replace),
            lambda: self.model.rename(source, to, no_replace),
        )

    @rule(node=NODES)
    def die(self, node: int) -> None:
        for _ in range(5):
            self.world.master.tick()
            for other in self.model.live - {node}:
                self.run(self.world.beat(other))
        self.model.live.discard(node)

    @rule(node=NODES)
    def live_again(self, node: int) -> None:
        self.run(self.world.beat(node))
        self.model.live.add(node)

    @rule(node=NODES)
    def wipe(self, node: int) -> None:
        piece = Full(node, b"\0" * 16, b"\xff" * 16, [])
        self.run(self.world.report(node, full=piece, fence=self.counter + 1))
        self.model.evict(node)

    @rule()
    def restart(self) -> None:
        """Known workers count as live afterwards (rule 17)."""
        self.loop.run_until_complete(stop_all(self.task))
        self.world = World(self.world.db)
        self.task = self.loop.create_task(self.world.committer.run())
        self.model.live = {1, 2}

    @invariant()
    def the_same_tree(self) -> None:
        assert self.run(read(self.world, "")) == self.model.visible(self.model.root)

    @invariant()
    def columns_agree(self) -> None:
        check_invariants(self.world.db)

    def teardown(self) -> None:
        self.loop.run_until_complete(stop_all(self.task))
        self.loop.close()


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except KvError as error:
        return type(error)


async def created(put: Awaitable[Any]) -> bool:
    return bool((await put).created)


async def nothing(call: Awaitable[Any]) -> None:
    await call


async def read(world: World, path: str) -> Tree:
    result: Tree = {}
    for name in await world.names(path):
        entry = world.stat(f"{path}/{name}")
        content = 0 if entry.address is None else entry.address.hash
        result[name] = await read(world, f"{path}/{name}") if entry.is_dir else content
    return result


NamespaceMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_namespace_machine = NamespaceMachine.TestCase
