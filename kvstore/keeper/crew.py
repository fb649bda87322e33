"""The file system processes of a mount: one serves, one may be starting, and when one ends another takes over.

Serving → (it ends) outage → (a successor is ready) serving. In an outage requests stay in the kernel; after the
deadline they are answered with EIO, until somebody serves again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from kvstore.keeper import channel
from kvstore.keeper.channel import Kind, Message
from kvstore.keeper.heritage import Heritage
from kvstore.keeper.loop import IN, Loop
from kvstore.keeper.process import FsProcess
from kvstore.keeper.spawner import Spawner
from kvstore.keeper.traffic import Connection, Traffic
from kvstore.keeper.upgrade import START_LIMIT_S as UPGRADE_LIMIT_S
from kvstore.keeper.upgrade import Report, Upgrade
from kvstore.keeper.watchdog import KILL_LIMIT_S, Limits, Watchdog

log = logging.getLogger(__name__)

START_LIMIT_S: Final = 60.0
"""From its start to SERVING."""
END_LIMIT_S: Final = 10.0
"""From END, or from closing its sockets, to its end."""


class Host(Protocol):
    """The keeper around them."""

    def mount(self) -> None:
        """Raises OSError."""

    def serving(self, line: str, facts: Mapping[str, str]) -> None:
        """For the first time."""

    def finish(self, code: int) -> None:
        """Nobody is left and nobody will come: end the keeper with this exit code."""


class Crew:
    """`served`: somebody has served; before that the end of the first process is the end of the keeper."""

    def __init__(self, argv: Sequence[str], loop: Loop, device: Connection, limits: Limits, host: Host) -> None:
        self._loop, self._host = loop, host
        self.spawner = Spawner(argv, loop)
        self.traffic = Traffic(loop, device, self.end, self._hung_up, self._read_control)
        self._watchdog = Watchdog(loop, self.traffic, limits)
        self.heritage = Heritage()
        self.current: FsProcess | None = None
        self.next: FsProcess | None = None
        self._leaving: list[FsProcess] = []
        """They have no work any more, but have not ended yet."""
        self._upgrade: Upgrade | None = None
        self.outages = self.restarts = 0
        self.served = False
        self.mounted = False
        self._outage_since_s: float | None = None
        self._exit_code: int | None = None
        """Set when the keeper is ending."""

    @property
    def is_ending(self) -> bool:
        return self._exit_code is not None

    @property
    def state(self) -> str:
        """For people."""
        if self.is_ending or self._upgrade is not None:
            return "ending" if self.is_ending else "upgrading"
        if self.current is None:
            return "failing" if self.traffic.relay.failing else "outage"
        return "serving" if self.current.served else "starting"

    # Starting one.

    def start(self) -> None:
        """Raises OSError when the command cannot be run."""
        self._spawn(self.spawner.argv, START_LIMIT_S)

    def _spawn(self, argv: Sequence[str], limit_s: float) -> None:
        process = self.spawner.spawn(argv, self.heritage.state_fd, limit_s)
        self.next = process
        self._loop.watch(process.pidfd, IN, lambda _: self._exited(process))
        self._loop.watch(process.control.fileno(), IN, lambda _: self._read_control(process))

    def _respawn(self) -> None:
        self.restarts += 1
        try:
            self._spawn(self.spawner.argv, START_LIMIT_S)
        except OSError as error:
            log.error("cannot start %s: %s", self.spawner.argv[0], error)
            self.spawner.later()

    # What they say.

    def _read_control(self, process: FsProcess) -> None:
        for message in process.messages():
            if not self._hear(process, message):
                for fd in message.fds:
                    os.close(fd)
        if process.control_ended and self._loop.forget(process.control.fileno()):
            self._hung_up(process)

    def _hear(self, process: FsProcess, message: Message) -> bool:
        """Whether the fd with it was taken over."""
        kind = message.kind
        if kind == Kind.BEAT:
            process.beat_s = self._loop.now_s
        elif kind == Kind.READY and process is self.next and not process.ready:
            process.ready = True
            self._loop.call_soon(self._use_next)
        elif process is not self.current:
            return False
        elif kind == Kind.SERVING:
            self._serves(process, message.json())
        elif kind == Kind.OFFER and len(message.fds) == 1:
            self.traffic.backing.offer(message.inode, message.fds[0], self._loop.now_s)
            return True
        else:
            return self.heritage.hear(message)
        return False

    def _serves(self, process: FsProcess, said: Mapping[str, Any]) -> None:
        process.served, process.kill_at_s = True, None
        self.spawner.argv = process.argv
        if not self.served:
            self.served = True
            self._host.serving(said["line"], said["facts"])
            return
        log.info("%s serves (generation %d)", process, self.spawner.generation)
        upgrade, self._upgrade = self._upgrade, None
        if upgrade is not None:
            upgrade.succeeded(process)

    # Taking over.

    def _use_next(self) -> None:
        """Whoever is starting takes over, if it is ready and its predecessor is gone."""
        process = self.next
        if process is None or not process.ready or self.is_ending:
            return
        if self.current is None:
            self._take_over(process)
        elif self._upgrade is not None:
            self._upgrade.quieten()

    def _take_over(self, process: FsProcess) -> None:
        if not self.mounted:
            try:
                self._host.mount()
            except OSError as error:
                log.error("cannot mount on %s: %s", error.filename, error.strerror)
                self.end(1)
                return
            self.mounted = True
            self.traffic.start()
        try:
            self.heritage.hand_over(process, self.traffic.relay.table())
        except (channel.Closed, BlockingIOError) as error:
            log.error("%s does not take over (%r): killed", process, error)
            process.kill()
            return
        process.beat_s = self._loop.now_s
        self.current, self.next, self._outage_since_s = process, None, None
        self.traffic.attach(process)
        if self._upgrade is not None:
            self._upgrade.taken_over()

    # Upgrades.

    def upgrade(self, python: str, report: Report) -> None:
        """Replace the process that serves by one that `python` runs."""
        if self.current is None or not self.current.served or self.next or self._upgrade or self.is_ending:
            report({"error": f"not now: the mount is {self.state}; try again in a moment"})
            return
        self._upgrade = Upgrade(self._loop, self.traffic, self.current, report)
        try:
            self._spawn([python, *self.spawner.argv[1:]], UPGRADE_LIMIT_S)
        except OSError as error:
            self._upgrade_failed(f"cannot start {python}: {error.strerror}")

    def step(self) -> None:
        """After each round of the loop."""
        if self._upgrade is not None:
            self._upgrade.step()

    def _upgrade_failed(self, why: str) -> None:
        upgrade, self._upgrade = self._upgrade, None
        if upgrade is not None:
            upgrade.failed(why)

    # Their ends.

    def _hung_up(self, process: FsProcess) -> None:
        """It has closed a socket: that is its end, or the beginning of it."""
        if process.yielding:
            self._loop.call_soon(lambda: self._leave(process))
        elif process is self.current and process.served and not self.is_ending:
            process.kill()
        else:  # its exit code says more than a kill
            process.kill_by(self._loop.now_s + END_LIMIT_S)

    def _exited(self, process: FsProcess) -> None:
        self._loop.forget(process.pidfd)
        code = process.exit_code
        if process is self.current:
            self._leave(process)
        elif process is self.next:
            self.next = None
            self._discard(process)
            if not self.is_ending and self.served:
                log.error("%s ended with code %s before it could serve; its own lines say why", process, code)
            self._upgrade_failed(f"the new process ended with code {code} before it could serve; its own lines say why")
            if self.served and self.current is None and not self.is_ending:
                self.spawner.later()
        self._leaving.remove(process)
        os.close(process.pidfd)
        self._finish_when_alone(code or 0)

    def _leave(self, process: FsProcess) -> None:
        """The one that served has ended, or makes way."""
        if process is not self.current:
            return
        self.traffic.detach()
        self.current = None
        self._discard(process)
        if self.is_ending or not self.served:
            return
        self._outage_since_s = self._loop.now_s
        if not process.yielding:
            self.outages += 1
            log.error(
                "%s ended (code %s): open files go on, other calls wait for its successor", process, process.exit_code
            )
        if not process.served:
            self._upgrade_failed("the new process ended before it served; its own lines say why")
        self.spawner.ended(process)
        if self._upgrade is not None:
            self._upgrade.old_is_gone()
        if self.next is not None:
            self._use_next()
        elif process.served:
            self._respawn()
        else:
            self.spawner.later()

    def _discard(self, process: FsProcess) -> None:
        self._loop.forget(process.control.fileno())
        process.close_sockets()
        process.kill_by(self._loop.now_s + END_LIMIT_S)
        self._leaving.append(process)

    def end(self, code: int = 0) -> None:
        """The mount is gone for good, or never came: let everybody end. `Host.finish` follows."""
        if self.is_ending:
            return
        self._exit_code = code
        self.spawner.never()
        self._upgrade_failed("the mount ends")
        if self.next is not None:
            self.next.kill_by(self._loop.now_s + KILL_LIMIT_S)
            self.next.terminate()
        if self.current is not None:
            self.current.kill_by(self._loop.now_s + END_LIMIT_S)
            try:
                self.current.tell(Kind.END)
            except (channel.Closed, BlockingIOError):
                self.current.kill()
        self._finish_when_alone(code)

    def _finish_when_alone(self, code: int) -> None:
        if self.current is None and self.next is None and not self._leaving:
            if self._exit_code is not None:
                self._host.finish(self._exit_code)
            elif not self.served:
                self._host.finish(code)

    def kill_all(self) -> None:
        """Nothing of ours stays behind."""
        for process in [self.current, self.next, *self._leaving]:
            if process is not None:
                process.kill()

    # Time.

    def tick(self) -> None:
        now_s = self._loop.now_s
        for process in [self.current, self.next, *self._leaving]:
            if process is not None:
                process.kill_if_due(now_s)
        if self.spawner.is_due:
            self._respawn()
        self.traffic.backing.sweep(now_s)
        if self.is_ending:
            return
        if self.current is None:
            if self._outage_since_s is not None:
                self._watchdog.check_outage(self._outage_since_s)
        elif not self._watchdog.check_process(self.current):
            self._leave(self.current)
