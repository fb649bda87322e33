"""What the worker answers to whoever asks whether to restart it, or to send it anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvstore.worker.main import _alive, _ready
from kvstore.worker.worker import Worker
from tests.support import worker_kit as kit


async def test_without_a_volume_in_service_it_is_neither_alive_nor_ready(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path)) as worker:
        worker.joined.set()
        assert said(worker) == [None, None]
        for volume in worker.store.volumes:
            volume.failed = "its drive went"
        assert said(worker) == ["no volume is in service: the log says why"] * 2


async def test_before_it_has_registered_it_is_alive_and_not_ready(tmp_path: Path) -> None:
    async with kit.running(kit.settings(tmp_path)) as worker:
        alive, ready = said(worker)
        assert alive is None
        assert ready is not None
        assert "not registered with a master" in ready


def said(worker: Worker) -> list[str | None]:
    problems: list[Callable[[], str | None]] = [_alive(worker), _ready(worker)]
    return [problem() for problem in problems]
