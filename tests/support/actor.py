"""Child processes with descriptors of their own. They carry out calls of `tests.support.fsops` within a deadline."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from tests.support.child import TIMEOUT_S, Hung
from tests.support.fsops import Call, Side

UMASK: Final = 0o022
_PR_SET_PDEATHSIG: Final = 1


class Actor:
    """A child process that carries out calls, one request at a time, until it is closed. One that hangs is killed."""

    def __init__(self, name: str, sides: Mapping[str, Path]) -> None:
        self.name = name
        """`pid` is 0 once it has ended."""
        self._ours, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._ours.close()
            _serve(theirs, {side: Side(root) for side, root in sides.items()})
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def ask(self, *requests: tuple[str, Call], timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Carry out (side, call) in order; their answers."""
        try:
            self._ours.send(requests)
            if not self._ours.poll(timeout_s):
                raise Hung(f"{self.name} hangs in {requests}")
            return self._ours.recv()  # type: ignore[no-any-return]
        except (EOFError, BrokenPipeError):
            self.end()
            raise AssertionError(f"{self.name} died in {requests}") from None
        except BaseException:  # an answer that comes too late must not be taken for the next one
            self.end()
            raise

    def end(self) -> None:
        """Whatever it does, and again. One that hangs in the kernel is left to whoever unmounts."""
        pid, self.pid = self.pid, 0
        if not pid:
            return
        self._ours.close()
        os.kill(pid, signal.SIGKILL)
        for _ in range(100):
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            time.sleep(0.01)


def _serve(pipe: Connection, sides: dict[str, Side]) -> NoReturn:
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        faulthandler.disable()  # a map beyond the end ends the child; the parent says in which call
        os.umask(UMASK)
        while True:
            requests = pipe.recv()
            pipe.send([each.on(sides[side]) for side, each in requests])
    except EOFError:  # the parent has gone
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a call raised what no file system answers; the parent sees the pipe end
        traceback.print_exc()
        os._exit(1)
