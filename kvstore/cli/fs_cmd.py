"""``kvstore fs``: files and directories of a store, without a mount."""

from __future__ import annotations

import base64
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli import fs_policies, fs_rows
from kvstore.cli.app import ConfigOption, new_app
from kvstore.cli.fs_rows import named
from kvstore.cli.output import Column, JsonOption, number_column, print_json, print_object, print_rows, size_column
from kvstore.cli.progress import transfer
from kvstore.cli.store import MasterOption, SocketOption, open_store
from kvstore.client.jobs import readable
from kvstore.client.sync import Client
from kvstore.config.units import format_size
from kvstore.core.errors import InvalidRequest, NotDirectory, NotFound
from kvstore.core.paths import normalize, split
from kvstore.core.types import Entry

app = new_app()
fs_policies.add_to(app)

COPY_BYTES = 1 << 20
STANDARD = "-"
"""In place of a local file: standard input or output."""


def from_root(path: str) -> str:
    """One spelling for messages, tables and JSON: ``a/b`` and ``/a//b/`` → ``/a/b``, nothing → ``/``."""
    return f"/{normalize(path)}"


def target_from_root(path: str) -> str:
    """The same, but a slash at the end stays: it says "a directory"."""
    return f"{from_root(path).rstrip('/')}/" if path.endswith("/") else from_root(path)


StorePath = Annotated[str, typer.Argument(metavar="PATH", help="In the store; / is its root.", callback=from_root)]


@app.callback()
def fs() -> None:
    """Look at and change what is in a store."""


@app.command("ls")
def list_directory(
    path: StorePath = "/",
    long: Annotated[bool, typer.Option("-l", "--long", help="Mode, owner, size, time, replicas.")] = False,
    master: MasterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List a directory, or one file."""
    with open_store(master, config, "") as client:
        entry = client.stat(path)
        rows: Iterable[tuple[str, Entry]] = client.list(path) if entry.is_dir else [(path, entry)]
        columns = fs_rows.LONG if long else fs_rows.SHORT
        print_rows((fs_rows.entry_row(name, row) for name, row in rows), columns, as_json)


@app.command("stat")
def show(
    path: StorePath, master: MasterOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """All about one name: inode, size, times, its block, where the replicas are and how hot, quota, TTL, pin."""
    with open_store(master, config, "") as client:
        entry = client.stat(path)
        holding = fs_policies.holding_row(client.policies(path))
        described = [] if entry.is_dir else client.describe(entry)
        where = {"where": fs_policies.described_rows(described, pinned=holding["pinned"])}
    columns = [*fs_rows.ALL, *([] if entry.is_dir else [fs_policies.HEAT]), *fs_policies.HOLDING]
    print_object({**fs_rows.entry_row(path, entry), **where, **holding}, columns, as_json)


@app.command("cat")
def cat(
    path: StorePath,
    master: MasterOption = None,
    worker_socket: SocketOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a file's bytes to standard output (with --json: in base64)."""
    with open_store(master, config, worker_socket) as client:
        _copy_out(client, path, as_json)


@app.command("put")
def put(
    source: Annotated[str, typer.Argument(metavar="FILE", help="Local file; - is standard input.")],
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="In the store; a directory takes the file's own name.", callback=target_from_root
        ),
    ],
    if_absent: Annotated[bool, typer.Option("--if-absent", help="Leave an existing file as it is.")] = False,
    master: MasterOption = None,
    worker_socket: SocketOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store a local file; missing directories are made."""
    with open_store(master, config, worker_socket) as client:
        if source == STANDARD:
            target = from_root(path)
            with named(target):
                result = client.put(target, sys.stdin.buffer.read(), if_absent=if_absent)
        else:
            target = _into(client, path, Path(source).name)
            with named(target), transfer(source, Path(source).stat().st_size) as progress:
                result = client.put_file(target, source, if_absent=if_absent, progress=progress)
    _report("stored" if result.created else "kept what is there", target, result.entry.length_bytes, as_json)


@app.command("get")
def get(
    path: StorePath,
    target: Annotated[
        Path, typer.Argument(metavar="FILE", help="Local file, - is standard output; a directory takes the name.")
    ] = Path(),
    master: MasterOption = None,
    worker_socket: SocketOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a file of the store to a local one, which is there as a whole or not at all."""
    with open_store(master, config, worker_socket) as client:
        if str(target) == STANDARD:
            _copy_out(client, path, as_json)
            return
        with named(path):
            entry = readable(client.stat(path), path)
            if target.is_dir():
                target = target / split(path)[-1]
            with transfer(path, entry.length_bytes) as progress:
                size = client.get_file(path, target, progress=progress)
    _report("copied to", str(target), size, as_json)


@app.command("mkdir")
def make_directory(
    path: StorePath,
    parents: Annotated[
        bool, typer.Option("-p", "--parents", help="Missing ones above too; an existing is fine.")
    ] = False,
    master: MasterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a directory."""
    with open_store(master, config, "") as client:
        entry = client.mkdir(path, parents=parents)
    if as_json:
        print_json(fs_rows.entry_row(path, entry))


@app.command("rm")
def remove(
    path: StorePath,
    recursive: Annotated[bool, typer.Option("-r", "--recursive", help="A directory with all below it.")] = False,
    force: Annotated[bool, typer.Option("-f", "--force", help="A missing name is fine.")] = False,
    master: MasterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a file, or an empty directory."""
    if recursive and not split(path):
        raise InvalidRequest("the root cannot be removed; remove the directories in it by name")
    with open_store(master, config, "") as client:
        try:
            for gone in fs_rows.remove_tree(client, path) if recursive else _remove_one(client, path):
                if as_json:
                    print_json({"removed": gone})
        except NotFound:
            if not force:
                raise


@app.command("mv")
def move(
    path: StorePath,
    to: Annotated[
        str,
        typer.Argument(
            metavar="TO", help="New path; an existing directory takes the old name.", callback=target_from_root
        ),
    ],
    no_replace: Annotated[bool, typer.Option("-n", "--no-replace", help="Fail when TO is there.")] = False,
    master: MasterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move a file or a directory."""
    with open_store(master, config, "") as client:
        target = _into(client, to, split(path)[-1] if split(path) else "")
        with named(target, fs_rows.MOVE_WORDS, source=path):
            client.rename(path, target, no_replace=no_replace)
    if as_json:
        print_json({"from": path, "to": target})


@app.command("du")
def disk_usage(
    path: StorePath = "/",
    depth: Annotated[int, typer.Option("-d", "--depth", min=0, help="Directories below, down to this depth.")] = 0,
    master: MasterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bytes, files and directories below a path, and the quotas of directories."""
    columns = [
        size_column("size_bytes", "SIZE"),
        number_column("files", "FILES"),
        number_column("directories", "DIRECTORIES"),
        Column("quota_bytes", "QUOTA", lambda size: format_size(size) if size else "-", "right"),
        Column("path", "PATH"),
    ]
    with open_store(master, config, "") as client:
        quotas = {policy.path: policy.quota_bytes for policy in client.all_policies()}
        rows = fs_rows.usage(client, path, depth)
        print_rows(({**row._asdict(), "quota_bytes": quotas.get(row.path, 0)} for row in rows), columns, as_json)


@app.command("df")
def free_space(
    path: StorePath = "/", master: MasterOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Capacity of the live volumes and what the store holds; below a quota, what that leaves."""
    columns = [
        size_column("capacity_bytes", "CAPACITY"),
        size_column("used_bytes", "USED"),
        size_column("free_bytes", "FREE"),
        number_column("files", "FILES"),
        number_column("directories", "DIRECTORIES"),
    ]
    with open_store(master, config, "") as client:
        print_rows([client.statfs(path)._asdict()], columns, as_json)


def _into(client: Client, path: str, name: str) -> str:
    """The path itself, or the name inside it when it is a directory (or says so with a slash at its end)."""
    try:
        is_dir = client.stat(path).is_dir
    except (NotFound, NotDirectory):
        is_dir = path.endswith("/")
    return f"{path.rstrip('/')}/{name}" if is_dir else from_root(path)


def _copy_out(client: Client, path: str, as_json: bool) -> None:
    """To standard output."""
    with named(path):
        if as_json:
            data = client.get(path)
            print_json({"path": path, "size_bytes": len(data), "base64": base64.b64encode(data).decode()})
            return
        with client.open(path) as block:
            shutil.copyfileobj(block, sys.stdout.buffer, COPY_BYTES)


def _remove_one(client: Client, path: str) -> list[str]:
    with named(path):
        client.remove(path)
    return [path]


def _report(what: str, path: str, size_bytes: int, as_json: bool) -> None:
    if as_json:
        print_json({"result": what, "path": path, "size_bytes": size_bytes})
    else:
        columns = [Column("result", "RESULT"), Column("path", "PATH"), size_column("size_bytes", "SIZE")]
        print_rows([{"result": what, "path": path, "size_bytes": size_bytes}], columns, with_json=False)
