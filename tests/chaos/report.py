"""What a run says at its end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tests.chaos.disks import DAMAGES
from tests.chaos.excuses import MOST_FAILED, MOST_UNEXCUSED, Puts
from tests.chaos.health import Life
from tests.chaos.judge import HANG_SLACK_S, STEPS, deadline_s, net_s, recovery_s
from tests.chaos.record import MISS, OK, Call
from tests.chaos.run import Outcome, pauses_of

_SHOWN: Final = 20
"""Of a list of complaints; the records have the rest."""
MEANINGS: Final[Mapping[str, str]] = {
    "kill": "SIGKILL; started again at the end",
    "kill fs": "SIGKILL of the process behind the keeper, which starts the next one",
    "stop": "SIGSTOP, and SIGCONT at the end",
    "stop fs": "likewise, of the process behind the keeper",
    "loss": "a share of the packets to it is lost",
    "deaf": "it hears nothing of some others, which hear it",
    "part": "it and some others hear nothing of each other",
    "rate": "what it sends is slow",
    "delay": "all between the master, node-2 and the client sync-far is late",
    "fill": "its disk is used up by somebody else",
    "wipe": "killed, its disk emptied, started again",
    "old image": "killed; its disk is as it was some time before",
    "blackout": "master and workers killed at once",
    "swap": "files of blocks have each other's bytes",
    "flip": "one bit of each of these blocks is another",
    "truncate": "files of blocks are cut short",
    "extend": "files of blocks have more bytes",
}
_OF_PUTS: Final = """
puts, by what was broken while they ran or was not back yet (one that met two kinds counts for both)
  failed: refused, or no answer in time. should have worked: those of them for which the master, a way to it and a
  worker were there, and nothing broke in the middle"""
_OF_CALLS: Final = """
calls, by the way they went: a = mount with passthrough, b = mount without; sync, async = clients with a local worker,
  sync-far = one without. a put by a mount is create, write, close, replace
  ok: done, and bytes that were read were right. miss: not there, which is how a cache may fail. errors: with a type
  longest: the call that came closest to its deadline, or passed it by most"""


def report(outcome: Outcome) -> str:
    return "\n".join(_lines(outcome))


def _lines(outcome: Outcome) -> Iterator[str]:
    yield f"\nchaos: {outcome.seconds:g} s of faults, seed {outcome.seed}"
    yield from _deeds(outcome)
    yield from _puts(outcome)
    yield from _calls(outcome)
    yield from _recoveries(outcome)
    yield from _growth(outcome.lives)
    yield from _stuck(outcome)
    yield from _verdict(outcome)


def _deeds(outcome: Outcome) -> Iterator[str]:
    yield "\nwhat was done"
    by_what = defaultdict[str, Counter[str]](Counter)
    for deed in outcome.deeds:
        if deed.done:
            by_what[deed.what][deed.target] += 1
    for what, targets in sorted(by_what.items()):
        to = ", ".join(f"{target} {count}" for target, count in sorted(targets.items()))
        yield f"  {what:10}{targets.total():4}  {MEANINGS[what]} ({to})"
    for deed in outcome.deeds:
        if not deed.done:
            yield f"  {deed.what} {deed.target}: {deed.detail}"
    damaged = sum(int(d.detail.split()[0]) for d in outcome.deeds if d.done and d.what in ("swap", *DAMAGES))
    yield f"blocks damaged: {damaged}; found by workers and moved to quarantine: {outcome.quarantined}"
    yield "  (the others were evicted, replaced, or are not looked at yet)"


def _puts(outcome: Outcome) -> Iterator[str]:
    yield _OF_PUTS
    yield f"  {'broken':24}{'puts':>8}{'failed':>8}{'':>7}{'should have worked':>20}"
    for row in outcome.puts.rows:
        share = f"{row.failed / row.puts:.0%}"
        yield f"  {row.broken:24}{row.puts:8}{row.failed:8}{share:>7}{row.unexcused:20}"


def _calls(outcome: Outcome) -> Iterator[str]:
    pauses, by_kind = pauses_of(outcome.deeds), defaultdict[tuple[str, str], list[Call]](list)
    for call in outcome.calls:
        by_kind[call.place, call.verb].append(call)
    yield _OF_CALLS
    yield f"  {'':16}{'all':>8}{'ok':>8}{'miss':>7}{'errors':>8}{'MB':>8}{'longest':>10}{'deadline':>10}"
    for (place, verb), calls in sorted(by_kind.items()):
        count = Counter(OK if c.outcome == OK else MISS if c.outcome == MISS else "error" for c in calls)
        worst = max(calls, key=lambda c: net_s(c, pauses) - deadline_s(c))
        moved = sum(c.length_bytes for c in calls if c.outcome == OK) / 1e6
        yield (
            f"  {place + ' ' + verb:16}{len(calls):8}{count[OK]:8}{count[MISS]:7}{count['error']:8}{moved:8.0f}"
            f"{net_s(worst, pauses):8.2f} s{deadline_s(worst):8.2f} s"
            f"{'  beyond it' if net_s(worst, pauses) > deadline_s(worst) else ''}"
        )
    yield from _sums(outcome)


def _sums(outcome: Outcome) -> Iterator[str]:
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
    if any("NotAsked" in what for _, what in errors):
        yield "  (NotAsked: refused in a millisecond, since whoever is needed did not answer a moment ago)"


def _recoveries(outcome: Outcome) -> Iterator[str]:
    reads = [c for c in outcome.calls if c.verb == "get"]
    found = defaultdict[str, list[float]](list)
    for deed in outcome.deeds:
        took_s = recovery_s(reads, deed.start_s, deed.end_s)
        if deed.done and took_s is not None:
            found[deed.what].append(took_s)
    yield "\nfrom the end of a fault until reads hit as often as before it: median, longest"
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
    yield "\nprocesses; what only grows is a leak (warm: after 5 s of its life)"
    yield f"  {'longest life of':18}{'lived':>8}{'MiB warm → last':>20}{'fds':>14}{'threads':>14}"
    for name, life in longest.items():
        w, e = life.warm, life.last
        memory = f"{w.rss_kib / 1024:.0f} → {e.rss_kib / 1024:.0f}"
        yield (
            f"  {name:18}{life.seconds:6.0f} s{memory:>20}{f'{w.fds} → {e.fds}':>14}{f'{w.threads} → {e.threads}':>14}"
        )


def _stuck(outcome: Outcome) -> Iterator[str]:
    stuck = sorted(outcome.longest_stuck_s.items(), key=lambda item: -item[1])
    yield "\nlongest in uninterruptible sleep (process/thread): " + (
        ", ".join(f"{name} {s:.1f} s" for name, s in stuck[:5]) or "nobody"
    )


def _verdict(outcome: Outcome) -> Iterator[str]:
    verdict, pauses = outcome.verdict, pauses_of(outcome.deeds)
    hangs = [
        f"{c.actor} {c.verb} {c.name}: {net_s(c, pauses):.2f} s, deadline {deadline_s(c):.2f} s, {c.outcome}, "
        f"began {c.start_s:.2f}"
        for c in verdict.hangs
    ]
    unasked = [f"{name}: {count}" for name, count in outcome.unasked.items()]
    yield f"\nverdict ({verdict.late} reads found a change that had failed and happened after all, which is allowed)"
    for what, found in (
        ("wrong reads (bytes that nobody wrote there, or older than what was acknowledged)", verdict.wrong),
        (f"hangs (longer than the deadline and {HANG_SLACK_S:g} s)", hangs),
        ("lost acknowledgements (the master's journal lacks them)", verdict.lost),
        ("errors without a type", verdict.untyped),
        ("processes that ended by themselves", unasked),
        ("other failures", outcome.failures),
    ):
        yield f"  {len(found)} {what}"
        yield from (f"    {line}" for line in found[:_SHOWN])
    yield from _of_puts(outcome.puts)
    yield "GOOD" if outcome.is_good else f"BAD: run again with SEED={outcome.seed}"


def _of_puts(puts: Puts) -> Iterator[str]:
    yield (
        f"  {len(puts.unexcused)} of {puts.due} puts that should have worked failed "
        f"({len(puts.unexcused) / max(1, puts.due):.1%}; at most {MOST_UNEXCUSED:.0%})"
    )
    if not puts.is_good:
        errors = Counter(f"{put.place} {put.outcome}" for put in puts.unexcused)
        yield from (f"    {what}: {count}" for what, count in errors.most_common(_SHOWN))
    share = puts.failed / max(1, puts.puts)
    yield f"  {puts.failed} of {puts.puts} puts failed in all ({share:.0%}; at most {MOST_FAILED:.0%})"
