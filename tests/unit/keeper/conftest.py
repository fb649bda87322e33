"""A whole keeper in a thread, a real file system process below it, a socket in place of /dev/fuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.fake_device import FakeDevice, Ran, keeper_thread
from tests.support.keeper_calls import command, until


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """What the file system shows."""
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "file").write_bytes(b"by passthrough")
    (shown / "direct").write_bytes(b"by READ")
    return shown


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with closing(FakeDevice()) as device:
        yield device


@pytest.fixture
def ran(directory: Path, device: FakeDevice) -> Iterator[Ran]:
    with keeper_thread(command(directory), device) as ran:
        until(lambda: ran.status()["state"] == "serving")
        yield ran
