"""Code that touches a mount runs in a child process with a deadline: a system call that hangs fails the test instead of
stopping it.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Generic, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_S = 20.0


class Hung(AssertionError):
    """The child did not end in time."""


class Child(Generic[T]):
    """A function running in a child process. `join` gives what it returned, or raises what it raised."""

    def __init__(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> None:
        self._name = getattr(function, "__name__", "function")
        self._reader, writer = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_and_exit(writer, lambda: function(*args, **kwargs))
        os.close(writer)

    def join(self, timeout_s: float = TIMEOUT_S) -> T:
        end, data = time.monotonic() + timeout_s, b""
        try:
            while chunk := self._read(max(0.0, end - time.monotonic())):
                data += chunk
        finally:
            self._end()
        if not data:
            raise AssertionError(f"{self._name}: the child died without a word")
        done, result = pickle.loads(data)
        if not done:
            raise result
        return result  # type: ignore[no-any-return]

    def kill(self) -> None:
        self._end()

    def _read(self, left_s: float) -> bytes:
        ready, _, _ = select.select([self._reader], [], [], left_s)
        if not ready:
            raise Hung(f"{self._name} hangs")
        return os.read(self._reader, 1 << 20)

    def _end(self) -> None:
        """Whether it still runs or not. One that hangs in the kernel is left to whoever unmounts."""
        os.close(self._reader)
        os.kill(self.pid, signal.SIGKILL)
        for _ in range(100):
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                return
            time.sleep(0.01)


def in_child(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it in a child process, and wait at most `TIMEOUT_S`."""
    return Child(function, *args, **kwargs).join()


def _run_and_exit(writer: int, function: Callable[[], object]) -> NoReturn:
    try:
        outcome: tuple[bool, object] = (True, function())
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent raises it
        outcome = (False, error)
    try:
        data = pickle.dumps(outcome)
    except Exception as error:  # noqa: BLE001
        data = pickle.dumps((False, AssertionError(f"{outcome[1]!r} cannot be passed on: {error}")))
    view = memoryview(data)
    while view:
        view = view[os.write(writer, view) :]
    os._exit(0)
