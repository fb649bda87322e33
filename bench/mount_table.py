"""What `bench.mount` found, for people: rates, shares of the plain directory, aims, CPU time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from bench.cpu import CLIENT
from bench.mount_load import STEPS, Sample
from bench.mount_places import DIRECT_IO, KEEP_CACHE, MODES, PASSTHROUGH, PLAIN

ROLES: Final = (CLIENT, "keeper", "file system", "worker", "master")
AIMS: Final = {
    "read, first": {PASSTHROUGH: 0.75, KEEP_CACHE: 0.28, DIRECT_IO: 0.35},
    "read, again": {KEEP_CACHE: 0.65},
    "write": {PASSTHROUGH: 0.45, KEEP_CACHE: 0.25, DIRECT_IO: 0.25},
    "LMCache get": {PASSTHROUGH: 0.75, KEEP_CACHE: 0.30, DIRECT_IO: 0.30},
    "LMCache put": {PASSTHROUGH: 0.60, KEEP_CACHE: 0.35, DIRECT_IO: 0.35},
}
"""Phase → mode → share of the plain directory that is to be reached."""
WHAT_WIDTH: Final = 36
CELL_WIDTH: Final = 16


class What(NamedTuple):
    """A row: one phase of one load."""

    phase: str
    load: str = ""
    """Size and how many at a time."""
    unit: str = "MB/s"


class Results:
    """Samples by row and place, one a round."""

    def __init__(self) -> None:
        self._samples: dict[What, dict[str, list[Sample]]] = {}

    def add(self, what: What, place: str, sample: Sample) -> None:
        self._samples.setdefault(what, defaultdict(list))[place].append(sample)

    def raw(self) -> list[dict[str, Any]]:
        """Every sample, for JSON."""
        return [
            {**what._asdict(), "place": place, **sample._asdict(), "rate": sample.rate}
            for what, places in self._samples.items() for place, samples in places.items() for sample in samples
        ]  # fmt: skip

    @property
    def rows(self) -> list[What]:
        return list(self._samples)

    @property
    def places(self) -> list[str]:
        known = {place for row in self._samples.values() for place in row}
        return [place for place in (PLAIN, *MODES) if place in known]

    def of(self, what: What, place: str) -> list[Sample]:
        return self._samples[what].get(place, [])

    def rate(self, what: What, place: str) -> float | None:
        """Median of the rounds: MB/s or calls/s."""
        rates = [sample.rate for sample in self.of(what, place)]
        return statistics.median(rates) / (1e6 if what.unit == "MB/s" else 1) if rates else None

    def share(self, what: What, place: str) -> float | None:
        """Of the plain directory's rate: the median of the rounds' own shares, since both of a round had the same
        neighbours.
        """
        pairs = zip(self.of(what, place), self.of(what, PLAIN), strict=False)
        shares = [here.rate / plain.rate for here, plain in pairs]
        return statistics.median(shares) if shares else None


def lines(results: Results, rounds: int) -> Iterator[str]:
    """Everything, one line after the other."""
    yield from _rates(results, rounds)
    yield from _steps(results)
    yield from _cpu(results)
    yield from _verdict(results)


def _rates(results: Results, rounds: int) -> Iterator[str]:
    places = results.places
    for unit in dict.fromkeys(what.unit for what in results.rows):
        yield ""
        yield f"{unit}, and share of the plain directory in the same run (median of {rounds}; + aim met, ! missed)"
        yield _row("", places) + "   aims"
        for what in (w for w in results.rows if w.unit == unit):
            row = _row(f"{what.phase}  {what.load}", [_rate(results, what, place) for place in places])
            yield f"{row}   {_aims(what, places)}".rstrip()


def _rate(results: Results, what: What, place: str) -> str:
    rate, share = results.rate(what, place), results.share(what, place)
    if rate is None or share is None:
        return "-"
    aim = AIMS.get(what.phase, {}).get(place)
    mark = " " if aim is None else "+" if share >= aim else "!"
    return f"{rate:,.0f}" if place == PLAIN else f"{rate:,.0f}  {share:.2f}{mark}"


def _aims(what: What, places: Iterable[str]) -> str:
    aims = AIMS.get(what.phase, {})
    return (
        " / ".join(f"{aims[place]:.2f}" if place in aims else "-" for place in places if place != PLAIN) if aims else ""
    )


def _steps(results: Results) -> Iterator[str]:
    yield ""
    yield "steps of a write, ms (median of the rounds' means)"
    yield _row("", STEPS)
    for what in (w for w in results.rows if w.phase == "write"):
        for place in results.places:
            samples = results.of(what, place)
            medians = [statistics.median(s.steps_s[step] for s in samples) * 1e3 for step in STEPS] if samples else []
            yield _row(f"{what.load}  {place}", [f"{ms:.2f}" for ms in medians])


def _cpu(results: Results) -> Iterator[str]:
    yield ""
    yield "CPU seconds per GB, all sizes together"
    yield _row("", ROLES)
    for phase in dict.fromkeys(w.phase for w in results.rows if w.phase in ("write", "read, first", "read, again")):
        rows = [w for w in results.rows if w.phase == phase]
        for place in results.places:
            samples = [sample for what in rows for sample in results.of(what, place)]
            gigabytes = sum(sample.amount for sample in samples) / 1e9
            cells = [sum(s.cpu_s.get(role, 0.0) for s in samples) / gigabytes for role in ROLES]
            known = {role for sample in samples for role in sample.cpu_s}
            shown = [f"{cell:.3f}" if role in known else "-" for role, cell in zip(ROLES, cells, strict=True)]
            yield _row(f"{phase}  {place}", shown)


def _verdict(results: Results) -> Iterator[str]:
    """Which aims are met, each by the worst of its loads."""
    yield ""
    for phase, aims in AIMS.items():
        rows = [what for what in results.rows if what.phase == phase]
        for place, aim in aims.items():
            shares = [share for what in rows if (share := results.share(what, place)) is not None]
            if shares:
                reached = sum(share >= aim for share in shares)
                met = "met" if reached == len(shares) else "missed"
                spread = f"{min(shares):.2f} to {max(shares):.2f}, {reached} of {len(shares)}"
                yield f"{met:7} {phase}, {place}: {spread} reach {aim:.2f}"


def _row(title: str, cells: Sequence[str]) -> str:
    return (f"{title:{WHAT_WIDTH}}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells)).rstrip()
