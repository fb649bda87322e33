"""Which puts may fail, judged from what was done. Pure.

A put needs the master, a way to it, and any one worker. While one of those is away it may fail, and until all serve
again and a little longer. So may one that was under way when anything broke: it may have been cut in half. Every other
put should have worked: who cannot reach its own worker stores at another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from tests.chaos.nemesis import Deed
from tests.chaos.record import OK, Call

SETTLED_S: Final = 3.0
"""From when all processes serve again: breakers close, heartbeats come, a new file system process warms up."""
NOTICED_S: Final = 2.0
"""From the beginning of a fault, until nobody waits for the dead one any more."""
MOST_UNEXCUSED: Final = 0.05
"""Share of those puts that should have worked: on two cores it is not rare that somebody has no processor for a second,
and to whoever waited for him the master was away.
"""
MOST_FAILED: Final = 0.5
"""Share of all puts: above it the run shows little, whatever excuses there are."""

_NODES: Final[Mapping[str, str]] = {"a": "node-0", "b": "node-1"}
"""Place → the network that its process is in."""
_NETWORK: Final = frozenset({"loss", "deaf", "part", "rate"})
NOTHING: Final = "nothing"


class Row(NamedTuple):
    """Puts during faults of one kind; one that met two kinds counts for both."""

    broken: str
    puts: int
    failed: int
    unexcused: int


class Puts(NamedTuple):
    puts: int
    failed: int
    """Of all."""
    due: int
    """Puts that should have worked."""
    unexcused: list[Call]
    """Of those, the ones that failed."""
    rows: list[Row]

    @property
    def is_good(self) -> bool:
        return self.failed <= MOST_FAILED * self.puts and len(self.unexcused) <= MOST_UNEXCUSED * self.due


def puts_of(calls: Iterable[Call], deeds: Sequence[Deed]) -> Puts:
    puts = [call for call in calls if call.verb == "put"]
    due = [put for put in puts if not any(excuses(deed, put) for deed in deeds)]
    unexcused = [put for put in due if put.outcome != OK]
    met = {id(put): _met(put, deeds) for put in puts}
    count, failed, left = (
        Counter(kind for put in those for kind in met[id(put)])
        for those in (puts, [put for put in puts if put.outcome != OK], unexcused)
    )
    rows = [Row(kind, count[kind], failed[kind], left[kind]) for kind in sorted(count)]
    return Puts(len(puts), sum(put.outcome != OK for put in puts), len(due), unexcused, rows)


def excuses(deed: Deed, put: Call) -> bool:
    """Whether the put may fail because of it."""
    if not deed.done:
        return False
    until_s = deed.back_s + SETTLED_S if _is_in_the_way(deed, put.place) else deed.start_s + NOTICED_S
    return put.start_s < until_s and put.end_s > deed.start_s


def _is_in_the_way(deed: Deed, place: str) -> bool:
    if deed.target == "proxy":
        return place == "sync-far"
    if deed.what in _NETWORK and deed.target == _NODES.get(place):
        return True
    return deed.target in ("master", "all", f"mount-{place}")


def _met(put: Call, deeds: Sequence[Deed]) -> set[str]:
    """What was broken while it ran, or was not back yet."""
    during = {d.kind for d in deeds if d.done and put.start_s < d.back_s + SETTLED_S and put.end_s > d.start_s}
    return during or {NOTHING}
