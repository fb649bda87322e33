"""Blocks of puts whose publish failed are given up; whether one was published all the same, their worker finds out."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.client.cache import MetadataCache
from kvstore.client.deadline import Deadline
from kvstore.client.flow import AsyncFlow, Flow
from kvstore.client.jobs import PutJob
from kvstore.client.lost import LostNames
from kvstore.client.messages import Publication, PublishResult
from kvstore.client.sockets import SealedBlock
from kvstore.client.threads import Threads
from kvstore.core.errors import KvError, NoSpace, Stale, Timeout, Unavailable
from kvstore.core.limits import MAX_BLOCK_BYTES
from kvstore.core.types import Address, BlockId, Entry

FILE = Entry(2, 0o100644, 0, 0, 3, 0, 0, None, ())
Answer = list[PublishResult | KvError] | KvError


class Parts:
    """In the place of a client's: `answers` are the master's, one a publish; `given_up` is what the workers hear."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = iter(answers)
        self.meta = self.blocks = self
        self.cluster = SimpleNamespace(max_block_bytes=MAX_BLOCK_BYTES)
        self.threads = Threads()
        self.stored: list[SealedBlock] = []
        self.given_up: list[SealedBlock] = []

    def start(self, deadline: Deadline) -> None:
        pass

    def check_master(self, deadline: Deadline) -> None:
        pass

    def publish(self, publications: Sequence[Publication], *, timeout_s: float, each_s: float) -> Any:
        answer = next(self._answers)
        if isinstance(answer, KvError):
            raise answer
        return answer

    def give_up(self, blocks: Sequence[SealedBlock], *, timeout_s: float) -> None:
        self.given_up += blocks
        raise Unavailable("it has gone, and that is no news to the caller")

    def store(self, index: int) -> SealedBlock:
        self.stored.append(SealedBlock(Address(BlockId(1, len(self.stored)), 3, 7), 5))
        return self.stored[-1]


class AsyncParts(Parts):
    async def start(self, deadline: Deadline) -> None:  # type: ignore[override]
        pass

    async def publish(self, *args: Any, **kwargs: Any) -> Any:
        return super().publish(*args, **kwargs)

    async def give_up(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super().give_up(*args, **kwargs)

    async def store(self, index: int) -> SealedBlock:  # type: ignore[override]
        return super().store(index)


@pytest.fixture(params=[Parts, AsyncParts], ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> type[Parts]:
    return request.param  # type: ignore[no-any-return]


async def put(parts: Parts, names: Sequence[str], timeout_s: float = 20.0) -> PutJob:
    job = PutJob(names, [3] * len(names), LostNames(), if_absent=False)
    make: Any = AsyncFlow if isinstance(parts, AsyncParts) else Flow
    done = make(parts, MetadataCache(1.0)).put(job, parts.store, Deadline(timeout_s))
    if inspect.isawaitable(done):
        await done
    return job


@pytest.mark.parametrize(
    "error", [NoSpace("quota"), Timeout("not done within 1 s"), Stale("fence"), Unavailable("gone")]
)
async def test_each_round_gives_up_what_it_could_not_publish(kind: type[Parts], error: KvError) -> None:
    parts = kind([error, [PublishResult([FILE], [True])]])
    job = await put(parts, ["a"])
    if isinstance(error, NoSpace | Timeout):
        assert job.done() == [error]
    else:
        assert len(parts.stored) == 2
    assert parts.given_up == parts.stored[:1]


async def test_what_was_published_stays(kind: type[Parts]) -> None:
    parts = kind([[PublishResult([FILE], [True])]])
    await put(parts, ["a"])
    assert parts.given_up == []


async def test_a_put_that_is_cancelled_gives_up_what_it_has_stored() -> None:
    parts, stored = AsyncParts([]), asyncio.Event()

    async def store(index: int) -> SealedBlock:
        if index:
            stored.set()
            await asyncio.sleep(60)
        return await AsyncParts.store(parts, index)

    parts.store = store  # type: ignore[method-assign]
    putting = asyncio.create_task(put(parts, ["a", "b"]))
    await stored.wait()
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert parts.given_up == parts.stored
    assert len(parts.stored) == 1
