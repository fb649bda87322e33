"""What lies in a volume and is not what its name says, or has no name that means anything: it goes, or it decides
nothing, and the blocks around it are served.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from kvstore.core.errors import Corrupt, KvError, NotFound
from kvstore.core.types import Address, BlockId
from kvstore.worker.volumes.volume import Volume
from kvstore.worker.worker import Worker
from tests.support import fake_master
from tests.support import worker_kit as kit

Make = Callable[[str], object]
DATA: Final = b"some data" * 1000
KINDS: Final[dict[str, Make]] = {
    "file": lambda path: Path(path).write_bytes(b"?"),
    "directory": os.mkdir,
    "pipe": os.mkfifo,
    "link": lambda path: os.symlink("/dev/null", path),
}
NAMES: Final = [
    "x", ".hidden", "0" * 200, "a-1.4.b", "\udcff\n.bin",
    "0000000000000001-01.4.0000000000000000", "0000000000000001-1.4.00000000000000FF", "1-1", "+0000000000000001-0",
]  # fmt: skip


@pytest.fixture
async def address(tmp_path: Path) -> Address:
    """Of a block that a worker left behind in the volume."""
    async with kit.running(kit.settings(tmp_path)) as worker:
        return (await kit.put(worker, DATA)).address


def volume_of(worker: Worker) -> Volume:
    return worker.store.volumes[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["blocks/00", "blocks/ff", "staging"])
async def test_strangers_go_and_take_nothing_with_them(
    tmp_path: Path, address: Address, part: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "volume-a" / part
    for name in NAMES:
        KINDS[kind](str(directory / name))
    caplog.clear()
    async with kit.running(kit.settings(tmp_path)) as worker:
        assert [name for name in os.listdir(directory) if name != address.file_name] == []
        assert sum("moved to quarantine" in r.getMessage() for r in caplog.records) == len(NAMES)
        assert await kit.get(worker, address) == DATA
        assert volume_of(worker).in_service
        await kit.check_books(worker)


async def test_strangers_of_one_name_and_of_all_kinds_find_a_place(tmp_path: Path, address: Address) -> None:
    """A directory takes no file's place, nor the other way round."""
    volume = tmp_path / "volume-a"
    for part in ("blocks/00", "blocks/02", "quarantine"):
        (volume / part / "x").mkdir()
        (volume / part / "x" / "y").touch()
    (volume / "blocks/01/x").write_bytes(b"?")
    async with kit.running(kit.settings(tmp_path)) as worker:
        assert volume_of(worker).in_service
        assert all(os.listdir(volume / "blocks" / part) == [] for part in ("00", "01", "02"))
        assert await kit.get(worker, address) == DATA


@pytest.mark.allow_errors("is corrupt")
async def test_a_name_that_promises_other_bytes_is_not_believed(
    tmp_path: Path, address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = address._replace(hash=address.hash ^ 1)
    async with kit.running(kit.settings(tmp_path)) as worker:
        right, other = (volume_of(worker).block_path(a) for a in (address, wrong))
    os.rename(right, other)
    async with kit.running(kit.settings(tmp_path)) as worker:
        with pytest.raises(Corrupt):
            await kit.get(worker, wrong)
        assert sum("is corrupt" in r.getMessage() for r in caplog.records) == 1
        assert [p.name for p in kit.files(worker, "quarantine")] == [wrong.file_name]


async def test_an_empty_file_is_no_block(tmp_path: Path, address: Address) -> None:
    """It would be told to a master that takes back names, which refuses the whole page for it."""
    empty = address._replace(block=BlockId(9, 9), length_bytes=0)
    path = tmp_path / "volume-a/blocks" / empty.file_name[-16:-14] / empty.file_name
    path.touch()
    async with kit.running(kit.settings(tmp_path)) as worker:
        assert [block.address for block in worker.store.all()] == [address]
        assert [p.name for p in kit.files(worker, "quarantine")] == [empty.file_name]
        path.touch()
        assert volume_of(worker).look_up(empty) is None
        path.unlink()


async def test_a_block_in_the_wrong_directory_is_none(tmp_path: Path, address: Address) -> None:
    async with kit.running(kit.settings(tmp_path)) as worker:
        path = Path(volume_of(worker).block_path(address))
    part = "00" if path.parent.name != "00" else "01"
    path.rename(path.parents[1] / part / path.name)
    async with kit.running(kit.settings(tmp_path)) as worker:
        assert len(worker.store) == 0
        assert [p.name for p in kit.files(worker, "quarantine")] == [address.file_name]


@pytest.mark.parametrize("kind", ["directory", "pipe", "link"])
async def test_what_lies_in_place_of_a_staging_file_ends_nobody(tmp_path: Path, address: Address, kind: str) -> None:
    KINDS[kind](str(tmp_path / "volume-a" / "staging" / f"{9:016x}-{9:016x}"))
    async with kit.running(kit.settings(tmp_path)) as worker:
        assert volume_of(worker).in_service
        with suppress(KvError):
            await worker.sealer.seal(worker.staging.find(9, 9), None)
        assert len(worker.store) == 1
        assert await kit.get(worker, address) == DATA


async def test_a_torn_staging_file_is_no_block(tmp_path: Path, address: Address) -> None:
    (tmp_path / "volume-a" / "staging" / f"{9:016x}-{8:016x}").write_bytes(b"half a blo")
    (tmp_path / "volume-a" / "staging" / f"{0:016x}-{8:016x}").write_bytes(b"half a replica")
    async with kit.running(kit.settings(tmp_path)) as worker:
        assert [block.address for block in worker.store.all()] == [address]
        assert not any(path.name.startswith("0" * 16) for path in kit.files(worker, "staging")), "nobody's own"


@pytest.mark.parametrize("value", [b"", b"garbage", b"\x01\xff\xff", b"\xff" * 4000, b"/another/name"])
async def test_an_attribute_decides_nothing(tmp_path: Path, address: Address, value: bytes) -> None:
    async with kit.running(kit.settings(tmp_path)) as worker:
        block = worker.store.get(address.block)
        assert block is not None
        os.setxattr(block.path, "user.kvstore.name", value)
        assert await kit.get(worker, address) == DATA
    async with kit.running(kit.settings(tmp_path)) as worker:
        assert await kit.get(worker, address) == DATA
        assert worker.counters.corruptions == 0


async def test_an_old_image_of_a_disk_brings_nothing_back(tmp_path: Path) -> None:
    """A copy of the volume is put back: what was removed since goes again, what came since is a miss, and ids that were
    given since are given to nothing else.
    """
    volume, image = tmp_path / "volume-a", tmp_path / "image"
    master = fake_master.make()
    async with fake_master.running(master):
        settings = kit.settings(tmp_path, master=master.endpoint)._replace(session_grace_s=60.0)
        async with kit.running(settings, joined=True) as worker:
            kept, removed = [await kit.put(worker, os.urandom(5000), owned=False) for _ in range(2)]
            for block in (kept, removed):
                master.publish(block.address)
            await kit.until(lambda: kept.owned and removed.owned)
        shutil.copytree(volume, image)
        async with kit.running(settings, joined=True) as worker:
            master.remove(removed.address)
            await master.until(lambda: removed.id not in master.replicas)
            newer = await kit.put(worker, os.urandom(5000), owned=False)
            master.publish(newer.address)
            await kit.until(lambda: newer.owned)
            boot = worker.store.fences.boot
        shutil.rmtree(volume)
        image.rename(volume)
        async with kit.running(settings, joined=True) as worker:
            await master.until(lambda: not master.replicas.get(newer.id))
            await kit.until(lambda: worker.store.get(removed.id) is None)
            assert [path.name for path in kit.files(worker, "blocks")] == [kept.address.file_name]
            with pytest.raises(NotFound):
                await kit.get(worker, newer.address)
            again = await kit.put(worker, b"data", owned=False)
            assert again.id.boot not in (boot, kept.id.boot)
