"""Plain mode: what a write has done that was reported as failed, or that nobody waits for any more."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from kvstore.core.errors import NoSpace
from kvstore.core.hashing import hash_block
from kvstore.core.limits import KIB, MIB
from tests.support.small_volume import SmallVolume, Time, area_on, new_file


class FailingDisk:
    """Takes the first 100 bytes of a write, and then no more."""

    def __init__(self, code: int) -> None:
        self._code, self._pwrite, self._taken = code, os.pwrite, 0

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        if self._taken:
            self._taken = 0
            raise OSError(self._code, os.strerror(self._code))
        self._taken = self._pwrite(fd, data[:100], offset)
        return self._taken


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("offset", [0, 3000, 4000, 5000], ids=["inside", "across_the_end", "at_the_end", "behind_it"])
async def test_a_write_that_failed_adds_nothing(
    tmp_path: Path, runtime: Time, monkeypatch: pytest.MonkeyPatch, offset: int, code: int
) -> None:
    """Neither a part of its bytes nor a hole; of an overwrite a part may be there, and is hashed."""
    volume = SmallVolume(tmp_path / "f", 64 * MIB)
    area, file = area_on(volume, runtime), new_file()
    await area.write(file, 0, b"A" * 4000)
    await area.hash(file)
    file.reserved_bytes = 64 * KIB
    volume.room = 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", FailingDisk(code).pwrite)
        with pytest.raises(NoSpace if code == errno.ENOSPC else OSError):
            await area.write(file, offset, b"B" * 2000)
    volume.room = 64 * MIB
    assert file.size_bytes == os.fstat(file.fd).st_size == 4000
    await area.write(file, 4000, b"C" * 10)  # an append goes where the file ends now
    await area.hash(file)
    overwritten = b"B" * 100 if offset < 4000 else b""
    whole = (b"A" * min(offset, 4000) + overwritten).ljust(4000, b"A") + b"C" * 10
    assert os.pread(file.fd, 8000, 0) == whole
    assert file.hashed is not None
    assert file.hashed.hash == hash_block(whole)
    await area.drop(file)


async def test_a_write_that_was_given_up_is_not_cut_under_its_thread(
    tmp_path: Path, runtime: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, pwrite, begun, go_on = SmallVolume(tmp_path / "f", 64 * MIB), os.pwrite, asyncio.Event(), threading.Event()
    area, file, loop = area_on(volume, runtime), new_file(), asyncio.get_running_loop()

    def slow(fd: int, data: bytes, offset: int) -> int:
        runtime.now_s += 0.01  # the next one goes to a thread
        if offset:
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(30)
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    await area.write(file, 0, b"A" * MIB)
    writing = asyncio.create_task(area.write(file, MIB, b"B" * MIB))
    await asyncio.wait_for(begun.wait(), 30)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert file.size_bytes == 2 * MIB
    go_on.set()
    await area.drop(file)
