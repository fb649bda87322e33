"""Fail the Nth call: an operation is carried out again and again, each time in a fresh cluster and with another one of
its calls failing, until it passes untouched (SQLite's method).

The cluster is the simulation's (`tests.sim.world`): its order is a seed's, so the first N - 1 calls are the same ones
each time, and what was found once is found again. Calls are counted at three seams: system calls of workers
(`worker.disk`), messages of the network, both ways (`rpc.transport`), writes and flushes of the master's database
(`master.storage.db`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

from kvstore.core.hashing import hash_block
from kvstore.worker.volumes import volume
from tests.sim import programs
from tests.sim.disk import SimDisk
from tests.sim.drive import Drive
from tests.sim.loop import Killed, Process
from tests.sim.weather import Fate
from tests.sim.world import World

OPENS: Final = frozenset(
    ("open_read", "create", "create_unnamed", "create_in_memory", "reopen_read", "names", "replace_durably",
     "sync_directory")
)  # fmt: skip
"""Calls that need a file descriptor."""
WRITES: Final = frozenset(
    ("create", "create_unnamed", "rename", "write", "copy", "make_directory", "set_attribute", "replace_durably")
)
"""Calls that may need a block of the disk."""
CALLS: Final = OPENS | WRITES | {"unlink", "free_bytes", "stat", "fstat", "read", "read_into", "attribute"}
HALF_DONE: Final = ("write", "copy")
"""What fails may have been half done by then."""


class Seam(enum.Enum):
    DISK = "system call"
    NET = "message"
    DB = "database call"


class End(enum.Enum):
    """Of the process that makes the call, before the call is carried out. What it told the kernel stays, what a
    database has not synced is lost.
    """

    CRASH = enum.auto()


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to the Nth call. `calls`: those that count; `lasting`: it happens to all that follow, too."""

    name: str
    seam: Seam
    effect: int | Fate | End
    """An errno, the fate of a message, or the end."""
    calls: frozenset[str] = CALLS
    lasting: bool = False


DISK_FAULTS: Final = (
    Fault("EIO", Seam.DISK, errno.EIO),
    Fault("ENOSPC", Seam.DISK, errno.ENOSPC, WRITES, lasting=True),
    Fault("EMFILE", Seam.DISK, errno.EMFILE, OPENS),
    Fault("crash", Seam.DISK, End.CRASH),
)
NET_FAULTS: Final = (Fault("lost", Seam.NET, Fate.LOST), Fault("reset", Seam.NET, Fate.BROKEN))
"""Of a request: it was not carried out; of a reply: it was, and the caller does not know."""
DB_FAULTS: Final = (Fault("fails", Seam.DB, errno.EIO), Fault("power", Seam.DB, End.CRASH))


UPKEEP: Final = ("lock", "identity", "identity.new")
"""Files that a worker looks at once a second, whatever is going on."""


class Trigger:
    """Counts calls while it is armed, on these hosts. `hit`: what the Nth one was, "" while there were fewer."""

    def __init__(self, fault: Fault, at: int, hosts: Sequence[str], *, with_upkeep: bool) -> None:
        self.fault, self._at, self._hosts, self._with_upkeep = fault, at, hosts, with_upkeep
        self._count, self._armed = 0, False
        self.hit = ""

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def strikes(self, seam: Seam, host: str, call: str, what: object) -> bool:
        fault = self.fault
        if not self._armed or seam is not fault.seam or call not in fault.calls | {seam.value}:
            return False
        if seam is Seam.DISK and not self._is_counted(host, call, str(what)):
            return False
        self._count += 1
        if self._count == self._at:
            self.hit = f"{host}: {call} {what}"
        return self._count == self._at or (fault.lasting and bool(self.hit))

    def _is_counted(self, host: str, call: str, what: str) -> bool:
        is_upkeep = call in ("free_bytes", "sync_directory") or os.path.basename(what) in UPKEEP
        return host in self._hosts and (self._with_upkeep or not is_upkeep)


class NthDisk(SimDisk):
    """Every method is one call, also those that others are made of."""

    def __init__(self, trigger: Trigger, drive: Drive, number: int, kill: Callable[[], None]) -> None:
        super().__init__(drive, number, kill)
        self._trigger = trigger

    def meet(self, call: str, carry_out_half: Callable[[], object], args: Sequence[object]) -> None:
        """Raises what is to happen to this call."""
        paths = [arg for arg in args if isinstance(arg, str)] or [_path_of(args[0] if args else None)]
        if self.dead or not self._trigger.strikes(Seam.DISK, self._drive.root.name, call, " ".join(paths)):
            return
        effect = self._trigger.fault.effect
        if effect is End.CRASH:
            self._kill()
            raise Killed
        assert isinstance(effect, int)
        carry_out_half()
        raise OSError(effect, os.strerror(effect), paths[0])


def _counted(call: str) -> Callable[..., Any]:
    carry_out = getattr(SimDisk, call)

    def counted(self: NthDisk, *args: Any) -> Any:
        def half() -> None:
            if call == "write":
                carry_out(self, args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
            elif call == "copy":
                carry_out(self, args[0], args[1], args[2] // 2)

        self.meet(call, half, args)
        return carry_out(self, *args)

    return counted


for _call in sorted(CALLS):
    setattr(NthDisk, _call, _counted(_call))


def _path_of(fd: object) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@contextlib.contextmanager
def seams(trigger: Trigger, contents: Iterable[bytes]) -> Iterator[None]:
    """Workers that are started within have disks that ask the trigger, and directories for blocks of these contents
    only: a start looks through all of them, each with a call of its own.
    """

    def make(drive: Drive, number: int, kill: Callable[[], None]) -> NthDisk:
        return NthDisk(trigger, drive, number, kill)

    fan_out = sorted({f"{hash_block(data):016x}"[:2] for data in contents})
    with mock.patch.object(programs, "SimDisk", make), mock.patch.object(volume, "FAN_OUT", fan_out):
        yield


def install(trigger: Trigger, world: World) -> None:
    """The other two seams, before anything is started."""
    fate, fault = world.net.fate, trigger.fault

    def fate_of(source: Process, target: str) -> Fate:
        if trigger.strikes(Seam.NET, source.host, "message", f"to {target}"):
            assert isinstance(fault.effect, Fate)
            return fault.effect
        return fate(source, target)

    def fails() -> bool:
        if not trigger.strikes(Seam.DB, "master", Seam.DB.value, len(world.master.log.batches)):
            return False
        if fault.effect is End.CRASH:
            cut_power(world)
            raise Killed
        return True

    world.net.fate = fate_of  # type: ignore[method-assign]
    world.master.log.fails = fails  # type: ignore[method-assign]


def cut_power(world: World) -> None:
    """Of the master: of what was not synced nothing is left."""
    log = world.master.log
    world.master.crash()
    del log.batches[log.synced :]
    log.forget()
    for batch in log.batches:
        log.listen(batch)


def open_files(root: Path) -> list[str]:
    """What is open below a directory, or was unlinked there; and files in memory."""
    links = (_path_of(fd) for fd in os.listdir("/proc/self/fd"))
    return sorted(link for link in links if link.startswith((f"{root}/", "/memfd:kvstore")))
