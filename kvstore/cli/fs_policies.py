"""``kvstore fs quota``, ``ttl``, ``pin``, ``unpin``, ``policies``: what holds for directories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from kvstore.cli.app import ConfigOption
from kvstore.cli.fs_rows import named
from kvstore.cli.output import Column, JsonOption, number_column, print_object, print_rows, size_column
from kvstore.cli.store import MasterOption, open_store
from kvstore.client.policies import Holding, Policy
from kvstore.client.remote import Described
from kvstore.config.units import format_size, parse_duration_s, parse_size
from kvstore.core.errors import InvalidRequest
from kvstore.core.paths import normalize

LEAST_QUOTA_BYTES: Final = 1 << 20
LEAST_TTL_S: Final = 1.0
NONE: Final = "none"
"""In place of a quota or a TTL: take it away."""


def _path(path: str) -> str:
    return f"/{normalize(path)}"


DirectoryPath = Annotated[str, typer.Argument(metavar="PATH", help="A directory of the store.", callback=_path)]
AnyPath = Annotated[str, typer.Argument(metavar="PATH", help="In the store.", callback=_path)]
Recursive = Annotated[bool, typer.Option("-r", "--recursive", help="A directory: all below it, now and later.")]


def add_to(app: typer.Typer) -> None:
    for name, command in (
        ("quota", quota), ("ttl", ttl), ("pin", pin), ("unpin", unpin), ("policies", list_policies),
    ):  # fmt: skip
        app.command(name)(command)


def quota(
    path: DirectoryPath,
    size: Annotated[str, typer.Argument(metavar="[BYTES|none]", help="For example 200GiB; nothing: show it.")] = "",
    master: MasterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """How much may be published below a directory; above it the directory's own coldest blocks go."""
    wanted = (
        None if not size else 0 if size == NONE else _at_least(parse_size(size), LEAST_QUOTA_BYTES, "quota", "1MiB")
    )
    _say(path, master, config, as_json, quota_bytes=wanted)


def ttl(
    path: DirectoryPath,
    time: Annotated[str, typer.Argument(metavar="[TIME|none]", help="For example 24h; nothing: show it.")] = "",
    master: MasterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """How long a block below a directory stays after its last use."""
    wanted = None if not time else 0.0 if time == NONE else _at_least(parse_duration_s(time), LEAST_TTL_S, "TTL", "1s")
    _say(path, master, config, as_json, ttl_s=wanted)


def pin(
    path: AnyPath,
    recursive: Recursive = False,
    master: MasterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Never evict a file, or with -r what is below a directory (up to `worker.pin_share` of each volume)."""
    with open_store(master, config, "") as client, named(path):
        if client.stat(path).is_dir and not recursive:
            raise InvalidRequest(f"{path}: is a directory; -r pins all that is below it, now and later")
    _say(path, master, config, as_json, pinned=True)


def unpin(
    path: AnyPath,
    recursive: Recursive = False,
    master: MasterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take the pin of a file or directory away, with or without -r; pins of their own below it stay."""
    _say(path, master, config, as_json, pinned=False)


def list_policies(master: MasterOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """All quotas, TTLs and pins of the store."""
    with open_store(master, config, "") as client:
        print_rows(map(policy_row, client.all_policies()), POLICY_COLUMNS, as_json)


def _say(path: str, master: str | None, config: str | None, as_json: bool, **wanted: Any) -> None:
    with open_store(master, config, "") as client, named(path):
        is_said = any(value is not None for value in wanted.values())
        holding = client.set_policy(path, **wanted) if is_said else client.policies(path)
    print_object({"path": path, **holding_row(holding)}, [Column("path", "PATH"), *HOLDING], as_json)


def policy_row(policy: Policy) -> dict[str, Any]:
    return policy._asdict()


def holding_row(holding: Holding) -> dict[str, Any]:
    """What holds for a path; None for what does not."""
    pin, ttl = holding.pin, holding.ttl
    return {
        "quotas": [
            {"path": p.path, "quota_bytes": p.quota_bytes, "used_bytes": p.used_bytes, "counting": p.counting}
            for p in holding.quotas
        ],
        "ttl_s": ttl.ttl_s if ttl else None,
        "ttl_of": ttl.path if ttl else None,
        "pinned": pin is not None,
        "pin_of": pin.path if pin else None,
        "inode": holding.inode,
    }


def described_rows(found: Sequence[Described], *, pinned: bool) -> list[dict[str, Any]]:
    """`pinned`: by its name; where there is no room for the pin (`worker.pin_share`) it has no effect."""
    return [
        {**described._asdict(), "pin": "pinned" if described.pinned else "pin without effect" if pinned else ""}
        for described in found
    ]


def duration(seconds: float) -> str:
    """For people: ``1 d 2 h``, ``3 m 20 s``, ``0.5 s``: the two largest units."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    parts, left = [], round(seconds)
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def _quotas(quotas: list[dict[str, Any]]) -> str:
    return "; ".join(
        f"{format_size(q['used_bytes'])} of {format_size(q['quota_bytes'])} below {q['path']}"
        + (" (still counting)" if q["counting"] else "")
        for q in quotas
    )


def _where(described: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{d['node']} ({d['tier']}): {d['heat']:.2f}"
        + (f", {d['pin']}" if d["pin"] else "")
        + (f", expires in {duration(d['expires_s'])}" if d["expires_s"] is not None else "")
        for d in described
    )


def _at_least(value: Any, least: float, what: str, example: str) -> Any:
    if value < least:
        raise InvalidRequest(f"a {what} below {example} would keep nothing; write {NONE} to take it away")
    return value


HOLDING = [
    Column("quotas", "QUOTA", lambda quotas: _quotas(quotas) or "-"),
    Column("ttl_s", "TTL", duration),
    Column("ttl_of", "TTL OF"),
    Column("pinned", "PINNED", lambda pinned: "yes" if pinned else "no"),
    Column("pin_of", "PIN OF"),
]
HEAT = Column("where", "HEAT", lambda described: _where(described) or "-")
POLICY_COLUMNS = [
    Column("path", "PATH"),
    Column("quota_bytes", "QUOTA", lambda size: format_size(size) if size else "-", "right"),
    size_column("used_bytes", "USED"),
    number_column("files", "FILES"),
    Column("ttl_s", "TTL", lambda ttl_s: duration(ttl_s) if ttl_s else "-", "right"),
    Column("pinned", "PINNED", lambda pinned: "yes" if pinned else "-"),
    Column("counting", "COUNTING", lambda counting: "yes" if counting else ""),
]
