"""The bytes of files that were given up, and are cut while their last holder goes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.worker.volumes.books import Books
from kvstore.worker.volumes.held import HeldBytes
from kvstore.worker.writes import givenup
from tests.support import worker_kit as kit
from tests.support.worker_kit import MIB


def test_what_was_released_has_no_size_any_more() -> None:
    books = Books(100, 0, held=30, slack=50)
    told = 0

    def on_free() -> None:
        nonlocal told
        told += 1

    held = HeldBytes(books, 20, on_free)
    held.resized(10)
    assert (books.held, books.slack, told) == (20, 60, 1)
    held.released()
    for late in (0, 50):
        held.resized(late)
    assert (books.held, books.slack, told) == (10, 70, 2)


@pytest.mark.parametrize("is_late", ["the cut", "the news of it"])
async def test_a_cut_that_ends_after_the_last_holder_has_gone_frees_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: str
) -> None:
    async with kit.running(kit.settings(tmp_path, capacity=32 * MIB)) as worker:
        (volume,) = worker.store.volumes
        begun, gate, real = asyncio.Event(), asyncio.Event(), worker.runtime.in_thread

        async def hold() -> None:
            begun.set()
            await gate.wait()

        async def slow(work: Callable[..., Any], *args: Any) -> Any:
            is_cut = work is givenup._cut_behind
            if is_cut and is_late == "the cut":
                await hold()
            result = await real(work, *args)
            if is_cut and is_late == "the news of it":
                await hold()
            return result

        staged, fd = await worker.staging.create(1, 8 * MIB)
        os.pwrite(fd, b"x" * (8 * MIB), 0)
        await worker.staging.abort(staged)
        volume.books.capacity = 8 * MIB
        os.pwrite(fd, b"x" * MIB, 8 * MIB)  # there is no room for that
        monkeypatch.setattr(worker.runtime, "in_thread", slow)
        async with asyncio.timeout(10):
            await worker.held.probe()
            await begun.wait()
            os.close(fd)
            while len(worker.held):
                await worker.held.probe()
            gate.set()
        await worker.background.close(10)
        assert (volume.books.held, volume.books.used) == (0, 0)
