"""The keeper's process: it owns the mount from the first file system process to the end, whoever serves meanwhile."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from kvstore.keeper.adminport import AdminPort, Answer
from kvstore.keeper.crew import Crew
from kvstore.keeper.holders import describe, holders
from kvstore.keeper.loop import Loop
from kvstore.keeper.notify import Notifier
from kvstore.keeper.side import SideThread
from kvstore.keeper.traffic import Connection
from kvstore.keeper.watchdog import Limits

log = logging.getLogger(__name__)

_ADMIN_WAIT_S: Final = 2.0
_UNMOUNT_RETRY_S: Final = 0.2
_BREATHER_S: Final = 0.05
"""After an error of our own, so that one that repeats does not fill the log."""


class Options(NamedTuple):
    directory: str
    """Absolute; an empty directory that nothing is mounted on."""
    command: Sequence[str]
    """Runs the file system process."""
    allow_other: bool = False
    limits: Limits = Limits(deadline_s=10.0, slow_deadline_s=35.0)
    busy_wait_s: float = 5.0
    """How long SIGTERM waits for open files before it detaches the mount."""
    notify_socket: str = ""


class Mountable(Connection, Protocol):
    """`device.Device`."""

    connection: int

    def mount(self, *, allow_other: bool) -> None: ...
    def unmount(self, *, lazy: bool) -> None: ...
    def close(self) -> None: ...


class Keeper:
    """`run` on one thread; `stop` from any."""

    def __init__(self, options: Options, device: Mountable) -> None:
        self._options, self._device = options, device
        self._started_at = time.monotonic()
        self._notifier = Notifier(options.notify_socket)
        self.loop = Loop(self._tick)
        self.crew = Crew(options.command, self.loop, device, options.limits, self)
        self._admin: AdminPort | None = None
        self._stopping = False
        self._exit_code: int | None = None

    def run(self) -> int:
        """Until the mount is gone; the exit code."""
        try:
            self.crew.start()
        except OSError as error:
            log.error("cannot start %s: %s", self._options.command[0], error)
            self._exit_code = 1
        try:
            while self._exit_code is None:
                self._round()
        finally:
            self._clean_up()
        return self._exit_code

    def stop(self) -> None:
        self.loop.call_soon(self._stop)

    def _round(self) -> None:
        try:
            self.loop.run_once()
            self.crew.step()
        except Exception:
            log.exception("internal error")
            time.sleep(_BREATHER_S)

    def _tick(self) -> None:
        self.crew.tick()

    # Asked for by the crew.

    def mount(self) -> None:
        self._device.mount(allow_other=self._options.allow_other)
        end = time.monotonic() + _ADMIN_WAIT_S
        while self._admin is None:
            try:
                self._admin = AdminPort(self.loop, self._device.connection, self._ask)
            except OSError as error:
                # The kernel gives the number of a mount that has gone to the next one, while its keeper still ends.
                if error.errno != errno.EADDRINUSE or time.monotonic() >= end:
                    log.warning("no admin socket (%s): no --upgrade, no status", error)
                    return
                time.sleep(_UNMOUNT_RETRY_S)

    def serving(self, line: str, facts: Mapping[str, str]) -> None:
        log.info("serving %s", self._options.directory)
        try:
            how = "" if self._notifier.is_supervised else f"; stop: umount {self._options.directory}"
            print(f"{line}{how}", flush=True)
        except OSError:  # nobody reads it
            pass
        self._notifier.ready(facts)

    def finish(self, code: int) -> None:
        self._exit_code = code

    # The end.

    def _stop(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._notifier.stopping()
        if self.crew.mounted:
            SideThread("unmount").submit(self._unmount)
        else:
            self.crew.end()

    def _unmount(self) -> None:
        """On a side thread: the kernel asks the file system process while it unmounts."""
        directory, wait_s = self._options.directory, self._options.busy_wait_s
        give_up_at, warned = time.monotonic() + wait_s, False
        try:
            while not self._unmounted():
                if time.monotonic() >= give_up_at:
                    who = describe(holders(directory))
                    log.warning("%s is busy (%s): detached; it ends for its users now", directory, who)
                    self._device.unmount(lazy=True)
                    break
                if not warned:
                    warned = True
                    log.warning("%s is busy (%s): waiting %g s", directory, describe(holders(directory)), wait_s)
                time.sleep(_UNMOUNT_RETRY_S)
        finally:
            self.loop.call_soon(self._give_up)

    def _unmounted(self) -> bool:
        try:
            self._device.unmount(lazy=False)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True

    def _give_up(self) -> None:
        """Nobody finds the mount any more. Who still has it open gets EIO at once, also while we end in order."""
        self.crew.end()
        self.crew.traffic.fail()

    def _clean_up(self) -> None:
        self.crew.kill_all()
        self.crew.traffic.stop()
        if self._admin is not None:
            self._admin.close()
        self._device.close()
        if self.crew.mounted:
            try:  # aborted, or never served: the dead mount must not stay
                self._device.unmount(lazy=True)
            except OSError as error:
                log.error("cannot unmount: %s", error)
        self.crew.heritage.close()
        self.loop.close()

    # Administration.

    def _ask(self, question: Mapping[str, Any], answer: Answer) -> None:
        verb = question.get("verb")
        if verb == "status":
            answer(self.status())
        elif verb == "upgrade" and isinstance(python := question.get("python"), str):
            self.crew.upgrade(python, answer)
        else:
            answer({"error": f"unknown verb {verb!r}"})

    def status(self) -> dict[str, Any]:
        crew, relay = self.crew, self.crew.traffic.relay
        return {
            "pid": os.getpid(),
            "state": crew.state,
            "directory": self._options.directory,
            "fs_pid": crew.current.pid if crew.current else 0,
            "generation": crew.spawner.generation,
            "uptime_s": round(time.monotonic() - self._started_at, 1),
            "pending": len(relay.pending),
            "opens": len(relay.handles),
            "backing_ids": len(crew.traffic.backing),
            "offers": crew.traffic.backing.offers,
            "kept": len(crew.heritage.kept),
            "outages": crew.outages,
            "fs_restarts": crew.restarts,
            "requests": relay.counts.requests,
            "resent": relay.counts.resent,
            "answered_eio": relay.counts.answered_eio,
            "late_replies": relay.counts.late,
            "dropped_notifications": crew.traffic.dropped_notifications,
        }
