"""Whether passthrough works here: the trial says why not, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.keeper import mountinfo, probe, wire
from tests.support.child import in_child

_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the trial mounts are made. Nothing may be left there."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    fds = len(os.listdir("/proc/self/fd"))
    yield place
    assert os.listdir(place) == []
    assert not [m for m in mountinfo.of_process() if m.path.startswith(str(place))]
    assert len(os.listdir("/proc/self/fd")) == fds


def test_the_probe_says_yes_and_leaves_nothing(place: Path, tmp_path: Path) -> None:
    with open(tmp_path / "f", "w+b") as file:
        begin = time.monotonic()
        assert probe.why_not([("a volume", file.fileno())]) is None
        assert time.monotonic() - begin < 1.0


def test_the_probe_names_what_cannot_back(place: Path, tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    layers = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, tmp_path / "merged"], check=True, timeout=10)
    try:
        with open(tmp_path / "merged" / "f", "w+b") as file, open(os.devnull) as null:
            why = probe.why_not([("volume one", file.fileno())])
            assert why is not None
            assert why.startswith("overlayfs cannot back (ELOOP): volume one")
            assert "Invalid argument" in (probe.why_not([("no file", null.fileno())]) or "")
    finally:
        subprocess.run(["umount", tmp_path / "merged"], check=True, timeout=10)


def without(*capabilities: int) -> Callable[[], str | None]:
    """Ask the probe without some of root's rights."""

    def ask() -> str | None:
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert _libc.capget(header, data) == 0
        for number in capabilities:
            data[3 * (number // 32)] &= ~(1 << number % 32)
        assert _libc.capset(header, data) == 0
        return probe.why_not()

    return ask


def test_the_probe_without_rights(place: Path) -> None:
    net_admin, sys_admin = 12, 21
    assert "CAP_NET_ADMIN" in (in_child(without(net_admin)) or "")
    assert "CAP_SYS_ADMIN" in (in_child(without(sys_admin)) or "")


def test_the_probe_without_a_device(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.keeper.device.DEVICE", "/dev/nowhere")
    assert "No such file" in (probe.why_not() or "")


def test_the_probe_on_an_old_kernel(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "offers_passthrough", lambda request: False)
    assert "has no FUSE passthrough" in (probe.why_not() or "")
