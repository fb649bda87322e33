"""``kvstore top``: what happens in a cluster, now."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from kvstore.cli.app import ConfigOption, new_app
from kvstore.cli.nodes_cmd import in_order, state
from kvstore.cli.output import Column, console, number_column, size_column, table
from kvstore.cli.rates import NodeRates, Rates, tiers
from kvstore.cli.store import MasterOption, open_store
from kvstore.client.messages import ClusterMap
from kvstore.config.units import format_size
from kvstore.core.errors import KvError, Timeout

app = new_app()

ASK_TIMEOUT_S: Final = 2.0
"""For one map, so that a master that is away shows soon, and a key is soon heard."""
QUIT: Final = frozenset(b"qQ")

Show = Callable[[Text], None]
Wait = Callable[[float], bool]
"""Waits for so many seconds; True when the person wants to leave."""


def _rate(value: float) -> str:
    return f"{value:,.1f}"


def _bytes_s(value: float) -> str:
    return f"{format_size(round(value))}/s"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def rate_column(key: str, title: str, show: Callable[[Any], str] = _rate) -> Column:
    return Column(key, title, show, "right")


NODE_COLUMNS: Final = [
    Column("node", "NODE"),
    Column("state", "STATE"),
    rate_column("hits_s", "HITS/S"),
    rate_column("fetches_s", "PEERS/S"),
    rate_column("misses_s", "MISSED/S"),
    rate_column("hit_ratio", "HIT RATIO", _percent),
    rate_column("read_bytes_s", "READ", _bytes_s),
    rate_column("written_bytes_s", "WRITTEN", _bytes_s),
]
TIER_COLUMNS: Final = [
    Column("node", "NODE"),
    Column("tier", "TIER"),
    size_column("capacity_bytes", "CAPACITY"),
    size_column("used_bytes", "USED"),
    number_column("blocks", "BLOCKS"),
    rate_column("hits_s", "HITS/S"),
    rate_column("hit_ratio", "RATIO", _percent),
    rate_column("promotions_s", "UP/S"),
    rate_column("demotions_s", "DOWN/S"),
    Column("unlinked", "UNLINKED/S"),
]
IntervalOption = Annotated[
    float, typer.Option("--interval", metavar="SECONDS", min=0.2, max=3600, help="Between two looks.")
]
CountOption = Annotated[int | None, typer.Option("--count", metavar="N", min=1, help="Leave after so many looks.")]


@app.command()
def top(
    master: MasterOption = None, config: ConfigOption = None, interval: IntervalOption = 2.0, count: CountOption = None
) -> None:
    """What happens a second, per node and tier, until q or Ctrl-C.

    HIT RATIO: of all reads on a node, those that found the block there.
    PEERS: reads for which the block was brought from another node.
    UP, DOWN: blocks moved into the tier from a slower or a faster one.
    Rates begin with the second look; without a terminal each look is lines.
    """
    with open_store(master, config, "") as client, terminal() as (show, wait), contextlib.suppress(KeyboardInterrupt):
        looks = Looks(lambda: client.cluster_map(timeout_s=ASK_TIMEOUT_S), show, wait)
        looks.run(interval, count)


class Looks:
    """One look after the other: ask for a map, show it, wait."""

    def __init__(
        self, ask: Callable[[], ClusterMap], show: Show, wait: Wait, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask, self._show, self._wait, self._now_s = ask, show, wait, now_s
        self._rates = Rates()
        self._last: ClusterMap | None = None

    def run(self, interval_s: float, count: int | None) -> None:
        """Until `wait` says so, or for `count` looks. Raises what the last one failed with when none of them succeeded,
        and at once what will not pass by itself.
        """
        done = 0
        while True:
            started_s = self._now_s()
            trouble = self._look(interval_s)
            done += 1
            if done == count:
                if trouble is not None and self._last is None:
                    raise trouble
                return
            if self._wait(max(0.0, started_s + interval_s - self._now_s())):
                return

    def _look(self, interval_s: float) -> KvError | None:
        trouble: KvError | None = None
        try:
            self._last = self._ask()
            self._rates.add(self._last, self._now_s())
        except KvError as error:
            if not error.retriable and not isinstance(error, Timeout):
                raise
            trouble = error
        self._show(screen(self._last, self._rates, interval_s, trouble))
        return trouble


def screen(cluster: ClusterMap | None, rates: Rates, interval_s: float, trouble: KvError | None) -> Text:
    """All that is shown at one moment; with `trouble` of the last map that came."""
    parts = [Text(f"{time.strftime('%H:%M:%S')}  every {interval_s:g} s")]
    if trouble is not None:
        parts.append(Text(f"the master is away, trying on: {trouble.message}", style="bold red"))
        parts.append(Text("below: what it said last" if cluster else "it was not reached yet"))
    if cluster is not None:
        parts += [
            Text("\n".join(summary(cluster, rates))),
            Text(),
            table(node_rows(cluster, rates), NODE_COLUMNS),
            Text(),
            table(tier_rows(cluster, rates), TIER_COLUMNS),
        ]
    return Text("\n", no_wrap=True, overflow="crop").join(parts)


def summary(cluster: ClusterMap, rates: Rates) -> list[str]:
    live = sum(node.live for node in cluster.nodes)
    lines = [f"cluster {cluster.cluster}: {live} of {len(cluster.nodes)} nodes live, {cluster.files:,} files"]
    if (asked := rates.lookups) is not None:
        found = "" if asked.hit_ratio is None else f", {_percent(asked.hit_ratio)} found"
        lines.append(f"look-ups {_rate(asked.lookups_s)}/s{found}")
    return lines


def node_rows(cluster: ClusterMap, rates: Rates) -> list[dict[str, Any]]:
    found = []
    for node in in_order(cluster):
        rate = rates.of(node)
        found.append({"node": node.id, "state": state(node), **(rate._asdict() if rate else {})})
    return found


def tier_rows(cluster: ClusterMap, rates: Rates) -> list[dict[str, Any]]:
    """Of the nodes that live."""
    return [
        {
            "node": node.id,
            "tier": tier.counters.tier,
            "capacity_bytes": tier.capacity_bytes,
            "used_bytes": tier.used_bytes,
            "blocks": tier.counters.blocks,
            **_tier_rates(rates.of(node), tier.counters.tier),
        }
        for node in in_order(cluster)
        if node.live
        for tier in tiers(node)
    ]


def _tier_rates(node: NodeRates | None, tier: str) -> dict[str, Any]:
    rate = node.tiers.get(tier) if node else None
    if rate is None:
        return {}
    unlinked = ", ".join(f"{reason} {_rate(files_s)}" for reason, files_s in rate.unlinked_s.items())
    return {**rate._asdict(), "unlinked": unlinked}


# ---- the terminal


class Terminal(NamedTuple):
    show: Show
    wait: Wait


@contextlib.contextmanager
def terminal() -> Iterator[Terminal]:
    """A screen that is drawn anew where there is one, else lines; and the keys of a keyboard, if there is one."""
    out = console()
    with contextlib.ExitStack() as undo:
        wait = undo.enter_context(_keyboard()) if sys.stdin.isatty() and sys.stdout.isatty() else _sleep
        show = undo.enter_context(_live(out)) if sys.stdout.isatty() and not out.is_dumb_terminal else _print_lines
        yield Terminal(show, wait)


@contextlib.contextmanager
def _live(out: Console) -> Iterator[Show]:
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda text: live.update(text, refresh=True)


@contextlib.contextmanager
def _keyboard() -> Iterator[Wait]:
    """Keys come as they are pressed and are not shown. However the command ends, the terminal is as it was."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    on_term = signal.signal(signal.SIGTERM, signal.default_int_handler)
    tty.setcbreak(fd)
    try:
        yield lambda seconds: _quit_pressed(fd, seconds)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, on_term)


def _quit_pressed(fd: int, seconds: float) -> bool:
    """A keyboard that is gone ends it too: nobody is there any more."""
    end = time.monotonic() + seconds
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return False
        keys = os.read(fd, 64)
        if not keys or QUIT.intersection(keys):
            return True


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _print_lines(text: Text) -> None:
    """Without escape codes, and at once: whoever reads a pipe waits for it."""
    sys.stdout.write(f"{text.plain}\n\n")
    sys.stdout.flush()
