"""What a run says at its end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from tests.chaos.disks import DAMAGES
from tests.chaos.health import Life
from tests.chaos.judge import HANG_SLACK_S, STEPS, deadline_s, net_s, recovery_s
from tests.chaos.record import MISS, OK, Call
from tests.chaos.run import Outcome, pauses_of

_SHOWN: Final = 20
"""Of a list of complaints; the records have the rest."""


def report(outcome: Outcome) -> str:
    return "\n".join(_lines(outcome))


def _lines(outcome: Outcome) -> Iterator[str]:
    yield f"\nchaos: {outcome.seconds:g} s of faults, seed {outcome.seed}"
    yield from _deeds(outcome)
    yield from _calls(outcome)
    yield from _recoveries(outcome)
    yield from _growth(outcome.lives)
    yield from _stuck(outcome)
    yield from _verdict(outcome)


def _deeds(outcome: Outcome) -> Iterator[str]:
    done = Counter(deed.what for deed in outcome.deeds if deed.done)
    yield "\ndone: " + ", ".join(f"{what} {count}" for what, count in sorted(done.items()))
    for what in ("kill", "stop"):
        to = Counter(deed.target for deed in outcome.deeds if deed.what == what)
        yield f"  {what}: " + ", ".join(f"{target} {count}" for target, count in sorted(to.items()))
    damaged = sum(int(d.detail.split()[0]) for d in outcome.deeds if d.done and d.what in ("swap", *DAMAGES))
    yield f"blocks damaged: {damaged}; found by workers and moved to quarantine: {outcome.quarantined}"
    for deed in outcome.deeds:
        if not deed.done:
            yield f"  {deed.what} {deed.target}: {deed.detail}"


def _calls(outcome: Outcome) -> Iterator[str]:
    pauses, by_kind = pauses_of(outcome.deeds), defaultdict[tuple[str, str], list[Call]](list)
    for call in outcome.calls:
        by_kind[call.place, call.verb].append(call)
    yield f"\n{'calls':16}{'all':>8}{'ok':>8}{'miss':>7}{'errors':>8}{'MB':>8}{'longest':>10}{'deadline':>10}"
    for (place, verb), calls in sorted(by_kind.items()):
        count = Counter(OK if c.outcome == OK else MISS if c.outcome == MISS else "error" for c in calls)
        worst = max(calls, key=lambda c: net_s(c, pauses) - deadline_s(c))
        moved = sum(c.length_bytes for c in calls if c.outcome == OK) / 1e6
        yield (
            f"{place + ' ' + verb:16}{len(calls):8}{count[OK]:8}{count[MISS]:7}{count['error']:8}{moved:8.0f}"
            f"{net_s(worst, pauses):8.2f} s{deadline_s(worst):8.2f} s"
            f"{'  beyond it' if net_s(worst, pauses) > deadline_s(worst) else ''}"
        )
    reads = [c for c in outcome.calls if c.verb == "get"]
    hits = [c for c in reads if c.outcome == OK]
    yield (
        f"\nread: {len(reads)} gets, {len(hits)} hits ({len(hits) / max(1, len(reads)):.0%}), "
        f"{sum(c.length_bytes for c in hits) / 1e6:.0f} MB compared"
    )
    errors = Counter(
        (c.verb, c.outcome.partition(":")[0])
        for c in outcome.calls
        if c.outcome not in (OK, MISS) and c.verb not in STEPS
    )
    yield "errors: " + (", ".join(f"{verb} {what} {n}" for (verb, what), n in errors.most_common()) or "none")


def _recoveries(outcome: Outcome) -> Iterator[str]:
    reads = [c for c in outcome.calls if c.verb == "get"]
    found = defaultdict[str, list[float]](list)
    for deed in outcome.deeds:
        took_s = recovery_s(reads, deed.start_s, deed.end_s)
        if deed.done and took_s is not None:
            found[deed.what].append(took_s)
    yield "\nuntil reads hit again as often as before (from the end of the fault; median, longest):"
    for what, times in sorted(found.items()):
        back = sorted(t for t in times if t >= 0)
        never = len(times) - len(back)
        line = f"{back[len(back) // 2]:5.1f} s {back[-1]:6.1f} s" if back else ""
        yield f"  {what:10}{line}{f'   {never} not before the end' if never else ''}"


def _growth(lives: Sequence[Life]) -> Iterator[str]:
    """The longest life of each name."""
    longest: dict[str, Life] = {}
    for life in lives:
        if life.name not in longest or life.seconds > longest[life.name].seconds:
            longest[life.name] = life
    yield f"\n{'longest life of':18}{'lived':>8}{'MiB warm → last':>20}{'fds':>14}{'threads':>14}"
    for name, life in longest.items():
        w, e = life.warm, life.last
        memory = f"{w.rss_kib / 1024:.0f} → {e.rss_kib / 1024:.0f}"
        yield (
            f"{name:18}{life.seconds:6.0f} s{memory:>20}{f'{w.fds} → {e.fds}':>14}{f'{w.threads} → {e.threads}':>14}"
        )


def _stuck(outcome: Outcome) -> Iterator[str]:
    stuck = sorted(outcome.longest_stuck_s.items(), key=lambda item: -item[1])
    yield "\nlongest in state D: " + (", ".join(f"{name} {s:.1f} s" for name, s in stuck[:5]) or "nobody")


def _verdict(outcome: Outcome) -> Iterator[str]:
    verdict, pauses = outcome.verdict, pauses_of(outcome.deeds)
    hangs = [
        f"{c.actor} {c.verb} {c.name}: {net_s(c, pauses):.2f} s, deadline {deadline_s(c):.2f} s, {c.outcome}, "
        f"began {c.start_s:.2f}"
        for c in verdict.hangs
    ]
    unasked = [f"{name}: {count}" for name, count in outcome.unasked.items()]
    yield f"\n{verdict.late} reads of changes that had failed, and happened late"
    for what, found in (
        ("wrong reads", verdict.wrong),
        (f"hangs (deadline + {HANG_SLACK_S:g} s)", hangs),
        ("lost acknowledgements", verdict.lost),
        ("errors without a type", verdict.untyped),
        ("processes that ended by themselves", unasked),
        ("other failures", outcome.failures),
    ):
        yield f"{len(found)} {what}"
        yield from (f"  {line}" for line in found[:_SHOWN])
    yield "GOOD" if outcome.is_good else f"BAD: run again with --seed {outcome.seed}"
