"""``kvstore mount DIR``: the store as a directory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from kvstore.cli.app import ConfigOption, new_app
from kvstore.cli.store import reaching
from kvstore.client import url
from kvstore.config import Config, load, require_grace, require_mount_dir
from kvstore.core.errors import InvalidRequest, NotFound, Unavailable, Unsupported
from kvstore.obs import logging as obs_logging

log = logging.getLogger(__name__)

app = new_app()


Directory = Annotated[
    str | None,  # a Path would be stat'ed: who serves it may be this very process, or dead
    typer.Argument(metavar="DIR", help="Where to mount; made if missing. Else mount.dir of the configuration."),
]
Master = Annotated[
    str | None,
    typer.Option(metavar="ADDR", help="kvstore://host:port, or host:port; else mount.master, worker.master."),
]
WorkerSocket = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="The local worker's socket; without one bytes go over the network."),
]
Shown = Annotated[
    str | None, typer.Option("--path", metavar="/DIR", help="Directory of the store to show; made if missing.")
]
Http = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Serve metrics and health there; off by default.")]
DirectIo = Annotated[
    bool | None,
    typer.Option("--direct-io/--no-direct-io", help="Plain mode: read past the kernel's cache; no shared maps then."),
]
Passthrough = Annotated[
    str | None,
    typer.Option(metavar="auto|on|off", help="The kernel reads and writes local files itself (Linux 6.9, root)."),
]
Consistency = Annotated[
    str | None,
    typer.Option(metavar="cached|strict", help="strict: ask the master for each look-up, keep nothing."),
]
Uid = Annotated[int | None, typer.Option("--uid", metavar="UID", help="Everything belongs to this user.")]
Gid = Annotated[int | None, typer.Option("--gid", metavar="GID", help="Everything belongs to this group.")]
Umask = Annotated[str | None, typer.Option(metavar="OCTAL", help="Everything has all permissions but these.")]
Deadline = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="How long a call waits for a file system process that is being restarted."),
]
AllowOther = Annotated[bool | None, typer.Option("--allow-other/--no-allow-other", help="Let other users in.")]
Upgrade = Annotated[
    bool, typer.Option("--upgrade", help="DIR is mounted: hand it over to this version of kvstore, and end.")
]


@app.command()
def run(
    directory: Directory = None,
    config: ConfigOption = None,
    master: Master = None,
    worker_socket: WorkerSocket = None,
    path: Shown = None,
    http: Http = None,
    direct_io: DirectIo = None,
    passthrough: Passthrough = None,
    consistency: Consistency = None,
    uid: Uid = None,
    gid: Gid = None,
    umask: Umask = None,
    deadline: Deadline = None,
    allow_other: AllowOther = None,
    upgrade: Upgrade = False,
) -> None:
    """Show the store as a directory until it is unmounted (umount DIR) or told to stop (SIGTERM, Ctrl-C)."""
    flags = {
        "mount.dir": directory,
        "mount.master": master,
        "mount.worker_socket": worker_socket,
        "mount.path": path,
        "mount.http": http,
        "mount.direct_io": direct_io,
        "mount.passthrough": passthrough,
        "mount.consistency": consistency,
        "mount.uid": uid,
        "mount.gid": gid,
        "mount.umask": umask,
        "mount.deadline": deadline,
        "mount.allow_other": allow_other,
    }
    if upgrade:
        refuse_changes(flags)
    loaded = load(config, flags).config
    obs_logging.setup("mount", loaded.log.level, loaded.log.format)
    if upgrade:
        hand_over(loaded)
    else:
        serve(loaded)


def serve(config: Config) -> None:
    """In this process, or as the keeper of one."""
    from kvstore.fuse import mode, mountpoint
    from kvstore.keeper.channel import Inheritance

    require_mount_dir(config)
    require_grace(config)
    if Inheritance.from_environment() is not None:
        run_here(config)
        return
    mountpoint.check_prerequisites()
    for line in mountpoint.prepare(mountpoint.absolute(config.mount.dir)):
        log.warning("%s", line)
    why_plain = mode.why_plain(config)
    if why_plain is None:
        mode.become_keeper(config, [sys.executable, "-m", "kvstore", *sys.argv[1:]])
    else:
        run_here(config, why_plain)


def run_here(config: Config, why_plain: str = "") -> None:
    try:
        from kvstore.fuse import main
    except ImportError as error:
        raise Unsupported(f"mounting needs pyfuse3: pip install 'kvstore[fuse]' ({error})") from None
    with reaching(url.parse(config.mount.master).endpoints, "mount.master"):
        main.main(config, why_plain, announce)


def refuse_changes(flags: Mapping[str, object]) -> None:
    """``--upgrade`` changes the program, not what it was started with."""
    given = [key.partition(".")[2] for key, value in flags.items() if value is not None and key != "mount.dir"]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InvalidRequest(
            f"--upgrade keeps what the mount was started with: leave out {options}, or unmount and mount anew"
        )


def hand_over(config: Config) -> None:
    """``--upgrade``: the keeper of the mount starts a file system process of this version."""
    from kvstore.fuse import mountpoint
    from kvstore.keeper import admin

    require_mount_dir(config)
    directory = mountpoint.absolute(config.mount.dir)
    try:
        done = admin.upgrade(directory, sys.executable)
    except admin.NoKeeper as error:
        raise NotFound(str(error)) from None
    except admin.UpgradeFailed as error:
        raise Unavailable(str(error)) from None
    announce(f"{directory}: process {done.new_pid} took over from {done.old_pid}; calls waited {done.pause_s:.2f} s")


def announce(line: str) -> None:
    typer.echo(line)
