"""Blocks and files that go: each once, and whoever gave up meanwhile."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvstore.core.errors import Timeout
from kvstore.worker.blocks.counters import Reason
from kvstore.worker.volumes.disk import Disk
from tests.support import worker_kit as kit
from tests.support.accounting import check_exact


@pytest.mark.parametrize("verb", ["drop", "evict"])
async def test_a_block_that_a_report_holds_twice_leaves_the_books_once(tmp_path: Path, verb: str) -> None:
    async with kit.running(kit.settings(tmp_path)) as worker:
        block, other = await kit.put(worker, b"goes"), await kit.put(worker, b"stays")
        freed = await getattr(worker.evictor, verb)([block, block], Reason.REMOVED)
        assert freed == block.used_bytes
        assert worker.store.get(other.id) is other
        await check_exact(worker)


@pytest.mark.allow_errors("out of service")
async def test_a_use_that_is_told_when_the_last_drive_has_failed_moves_nothing(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path)) as worker:
        block = await kit.put(worker, b"was read a moment ago")
        worker.store.fail(block.volume, "its drive failed")
        worker.mover.touched(block)


class SlowOpen(Disk):
    """Opens that wait until they may go on."""

    def __init__(self) -> None:
        self.may_go, self.opened = threading.Event(), threading.Event()
        self.may_go.set()

    def open_read(self, path: str) -> int:
        self.may_go.wait(10)
        fd = super().open_read(path)
        self.opened.set()
        return fd


async def test_a_file_that_is_opened_after_its_reader_gave_up_is_closed_again(tmp_path: Path) -> None:
    disk = SlowOpen()
    async with kit.running(kit.settings(tmp_path), disk) as worker:
        block = await kit.put(worker, b"takes long")
        block.stamp = None  # to be verified: not by the way that opens without a thread
        disk.may_go.clear()
        disk.opened.clear()
        with pytest.raises(Timeout):
            await worker.opener.open(block.address, (), 0.05)
        disk.may_go.set()
        await kit.until(disk.opened.is_set)
        await kit.until(lambda: not open_files(block.path))


def open_files(path: str) -> list[str]:
    """This process's open descriptors of a file."""
    return [fd for fd in os.listdir("/proc/self/fd") if _target(fd) == path]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""
