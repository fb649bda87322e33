"""Staging files made in advance."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvstore.client.blocks import AsyncBlocks
from kvstore.client.staging import Staging
from kvstore.core.errors import NoSpace
from kvstore.fuse.spares import IDLE_S, KEEP, Spares
from kvstore.runtime import SystemRuntime


class Worker:
    """Blocks that count what is staged and given back."""

    def __init__(self) -> None:
        self.staged, self.aborted, self.full = list[int](), 0, False

    async def stage(self, size_hint: int = 0) -> Staging:
        await asyncio.sleep(0)
        if self.full:
            raise NoSpace
        self.staged.append(size_hint)
        return Staging(self, -1, handle=len(self.staged))

    async def abort(self, staging: Staging) -> None:
        self.aborted += 1


class Time(SystemRuntime):
    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


def spares_on(worker: Worker) -> tuple[Spares, Time]:
    time = Time(1)
    return Spares(cast(AsyncBlocks, worker), time), time


async def until(ready: int, worker: Worker) -> None:
    while len(worker.staged) < ready:  # noqa: ASYNC110 - the worker has no event
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.001)


async def test_the_first_one_is_not_there_and_then_there_are_always_some() -> None:
    worker = Worker()
    spares, _ = spares_on(worker)
    assert spares.take() is None
    await until(KEEP, worker)
    taken = [spares.take() for _ in range(KEEP)]
    assert len({spare.handle for spare in taken if spare}) == KEEP
    await until(2 * KEEP, worker)
    assert set(worker.staged) == {0}, "they take no room from those who write"


async def test_idle_ones_are_given_back() -> None:
    worker = Worker()
    spares, time = spares_on(worker)
    spares.take()
    await until(KEEP, worker)
    await spares.sweep()
    assert worker.aborted == 0
    time.now_s += IDLE_S
    await spares.sweep()
    assert worker.aborted == KEEP
    assert spares.take() is None


@pytest.mark.parametrize("times", [3])
async def test_without_room_there_are_none_and_that_is_all(times: int) -> None:
    worker = Worker()
    worker.full = True
    spares, _ = spares_on(worker)
    for _ in range(times):
        assert spares.take() is None
        await asyncio.sleep(0.01)
    worker.full = False
    spares.take()
    await until(KEEP, worker)
    assert spares.take() is not None
