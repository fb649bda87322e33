"""``python -m kvstore.keeper [options] DIR -- COMMAND…``: started by `kvstore mount` in its own place (exec)."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Final

from kvstore.keeper import logs, mountinfo
from kvstore.keeper.device import DEVICE, Device
from kvstore.keeper.keeper import Keeper, Options
from kvstore.keeper.loop import IN
from kvstore.keeper.watchdog import Limits

log = logging.getLogger("kvstore.keeper")

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(argv: Sequence[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    arguments = _parser().parse_args(argv[:cut])
    command = argv[cut + 1 :]
    if not command:
        _parser().error("what runs the file system process is missing: … DIR -- COMMAND…")
    logs.setup(arguments.log_level, arguments.log_format)
    options = Options(
        mountinfo.absolute(arguments.directory),
        command,
        arguments.allow_other,
        Limits(arguments.deadline, arguments.slow_deadline),
        arguments.busy_wait,
        os.environ.pop("NOTIFY_SOCKET", ""),
    )
    _raise_fd_limit()
    try:
        device = Device(options.directory)
    except OSError as error:
        log.error("cannot open %s: %s", DEVICE, error.strerror)
        return 1
    keeper = Keeper(options, device)
    with _stopped_by_signals(keeper):
        gc.freeze()
        return keeper.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore.keeper", usage="%(prog)s [options] DIR -- COMMAND…", allow_abbrev=False
    )
    parser.add_argument("directory", metavar="DIR", help="where to mount")
    parser.add_argument("--allow-other", action="store_true", help="let other users in")
    parser.add_argument("--deadline", type=float, default=10.0, metavar="S", help="EIO while nobody serves")
    parser.add_argument("--slow-deadline", type=float, default=35.0, metavar="S", help="EIO while somebody serves")
    parser.add_argument("--busy-wait", type=float, default=5.0, metavar="S", help="from SIGTERM to a lazy unmount")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    parser.add_argument("--log-format", choices=["text", "json"], default="text")
    return parser


def _raise_fd_limit() -> None:
    """Backing files and kept fds of a large mount are many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _stopped_by_signals(keeper: Keeper) -> socket.socket:
    """Signals arrive as bytes on a socket that the loop reads; to be closed after the loop."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    for number in _STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer.detach())

    def stop(events: int) -> None:
        reader.recv(4096)
        keeper.stop()

    keeper.loop.watch(reader.fileno(), IN, stop)
    return reader


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
