"""The ways to the store: a mount with LMCache's system calls, and the SDK. All have one face."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from kvstore import Client, NotFound
from tests.support.blocking import BlockingClient


class Step(NamedTuple):
    """One system call of a put; what it is called, and when."""

    verb: str
    start_s: float
    end_s: float


class Place(Protocol):
    """Names are relative to the load's directory. A miss is None or False; all else raises KvError or OSError."""

    @property
    def steps(self) -> Sequence[Step]: ...

    def put(self, name: str, data: bytes) -> None: ...
    def get(self, name: str) -> bytes | None: ...
    def exists(self, name: str) -> bool: ...
    def remove(self, name: str) -> None: ...
    def rename(self, name: str, to: str) -> None: ...
    def names(self, directory: str) -> list[str]: ...


class MountPlace:
    """A directory of a mount, for one thread. `steps`: of its last put, which is several calls of the kernel."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.steps: list[Step] = []

    def put(self, name: str, data: bytes) -> None:
        temporary = self._path / f"{name}.tmp"
        self.steps = []
        try:
            self._write(temporary, data)
            with self._step("replace"):
                os.replace(temporary, self._path / name)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _write(self, temporary: Path, data: bytes) -> None:
        with self._step("create"):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            with self._step("write"):
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
        finally:
            with self._step("close"):
                os.close(fd)

    @contextlib.contextmanager
    def _step(self, verb: str) -> Iterator[None]:
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.steps.append(Step(verb, start_s, time.monotonic()))

    def get(self, name: str) -> bytes | None:
        try:
            return (self._path / name).read_bytes()
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        try:
            os.stat(self._path / name)
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        os.unlink(self._path / name)

    def rename(self, name: str, to: str) -> None:
        os.rename(self._path / name, self._path / to)

    def names(self, directory: str) -> list[str]:
        return os.listdir(self._path / directory)


class SdkPlace:
    """A client, of either kind. Its calls are whole: they have no `steps`."""

    steps: Sequence[Step] = ()

    def __init__(self, client: Client | BlockingClient, directory: str) -> None:
        self._client, self._directory = client, directory

    def put(self, name: str, data: bytes) -> None:
        self._client.put(self._full(name), data)

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(self._client.get(self._full(name)))
        except NotFound:
            return None

    def exists(self, name: str) -> bool:
        return bool(self._client.exists(self._full(name)))

    def remove(self, name: str) -> None:
        self._client.remove(self._full(name))

    def rename(self, name: str, to: str) -> None:
        self._client.rename(self._full(name), self._full(to))

    def names(self, directory: str) -> list[str]:
        return [name for name, _ in self._client.list(self._full(directory))]

    def _full(self, name: str) -> str:
        return f"{self._directory}/{name}"
