"""What must hold, judged from what was written down. Pure.

**Versions.** Each name belongs to one actor, whose changes have numbers (turns) and happen in order. The newest
acknowledged change that had ended before a read began (and before what its place may remember) is a lower bound: what
is older is wrong. A change that failed may or may not have happened, or happen a little later: it is allowed, also
beside a newer one that was acknowledged meanwhile ("late"). A miss is always allowed.

**Acknowledgements.** Each acknowledged put, rename and remove stands in the master's journal, and its names are what
the journal says.

**Hangs.** No call takes more than its deadline and two seconds. Time in which the process that answers the kernel for a
mount was stopped does not count: nobody else can answer there.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.client.messages import Event
from kvstore.core.errors import KvError, NotFound
from kvstore.core.limits import METADATA_TIMEOUT_S, fetch_timeout_s, store_timeout_s
from kvstore.core.types import Entry
from tests.chaos.limits import MOUNT_DEADLINE_S, MOUNTS
from tests.chaos.record import OK, UNTYPED, WRONG, Call

HANG_SLACK_S: Final = 2.0
LATE_S: Final = 30.0
"""So long after its end a failed change may still happen: a stopped master reads it when it wakes."""

STEPS: Final = ("create", "write", "close", "replace")
_STORING: Final = frozenset({"put", "write", "close", "replace"})
"""They may wait for room, hash, seal, and send bytes elsewhere."""

Pauses = Mapping[str, Sequence[tuple[float, float]]]
"""Place → (start, end) of the times in which nobody could answer there."""


class Change(NamedTuple):
    """One change of one name; `is_there` False for a remove, or the name that a rename leaves."""

    turn: int
    start_s: float
    end_s: float
    is_acknowledged: bool
    is_there: bool
    actor: str
    place: str


class Verdict(NamedTuple):
    wrong: list[str]
    """Each with what was read, and what it should have been."""
    late: int
    """Reads of a change that had failed, and happened after a newer one."""
    hangs: list[Call]
    lost: list[str]
    """Acknowledged changes that the master's journal does not have."""
    untyped: list[str]
    """Calls that raised what is neither a `KvError` nor an `OSError`."""


def judge(
    calls: Sequence[Call], events: Iterable[Event], root: str, stale_s: Mapping[str, float], pauses: Pauses
) -> Verdict:
    """`root`: the directory that names are relative to, as events spell it; `stale_s`: place → how long it may believe
    what it knows of names that others change.
    """
    changes = changes_of(calls)
    wrong, late = [f"{c.actor} {c.verb} {c.name}: {c.outcome}" for c in calls if c.outcome.startswith(WRONG)], 0
    for call in calls:
        if call.verb == "get" and call.outcome == OK:
            complaint, is_late = check_read(call, changes[call.name], stale_s[call.place])
            wrong += [complaint] if complaint else []
            late += is_late
    hangs = [call for call in calls if net_s(call, pauses) > deadline_s(call) + HANG_SLACK_S]
    untyped = [f"{c.actor} {c.verb} {c.name}: {c.outcome}" for c in calls if c.outcome.startswith(UNTYPED)]
    return Verdict(wrong, late, hangs, lost_of(calls, events, root), untyped)


def changes_of(calls: Iterable[Call]) -> Mapping[str, list[Change]]:
    """Name → its changes in order of their turns."""
    changes: dict[str, list[Change]] = defaultdict(list)
    for call in calls:
        made = Change(call.turn, call.start_s, call.end_s, call.outcome == OK, True, call.actor, call.place)
        if call.verb == "put":
            changes[call.name].append(made)
        elif call.verb == "rename":
            changes[call.target].append(made)
            changes[call.name].append(made._replace(is_there=False))
        elif call.verb == "remove":
            changes[call.name].append(made._replace(is_there=False))
    for made_here in changes.values():
        made_here.sort(key=lambda change: (change.turn, change.end_s))
    return changes


def check_read(call: Call, changes: Sequence[Change], stale_s: float) -> tuple[str, bool]:
    """(what is wrong with the version that a read found, "" for nothing; whether it was a late one).

    `changes` are in order of their turns, and so of their times: one actor makes them one after the other.
    """
    at = bisect.bisect_left(changes, call.turn, key=lambda change: change.turn)
    at += at < len(changes) and not changes[at].is_there
    if at == len(changes) or changes[at].turn != call.turn or changes[at].start_s > call.end_s:
        return f"{call.actor} read turn {call.turn} of {call.name}, which nobody had written", False
    made = changes[at]
    known_s = call.start_s if made.actor == call.actor else call.start_s - stale_s
    known = bisect.bisect_right(changes, known_s, key=lambda change: change.end_s)
    bound = next((changes[i] for i in range(known - 1, at, -1) if changes[i].is_acknowledged), None)
    if bound is None:
        return "", False
    if not made.is_acknowledged and made.end_s >= bound.start_s - LATE_S:
        return "", True
    ago_s = call.start_s - bound.end_s
    return (
        f"{call.actor} read turn {call.turn} of {call.name}; turn {bound.turn} "
        f"({'put' if bound.is_there else 'removed'}) was acknowledged {ago_s:.2f} s before"
    ), False


def deadline_s(call: Call) -> float:
    """Of a call of the SDK, its default; of a system call also the time that it may wait for a new file system process.
    A put by a mount is several of those.
    """
    if call.place in MOUNTS and call.verb == "put":
        return sum(deadline_s(call._replace(verb=step)) for step in STEPS)
    if call.verb in _STORING:
        moved_s = store_timeout_s(call.length_bytes)
    else:
        moved_s = fetch_timeout_s(call.length_bytes) if call.verb == "get" else 0.0
    return METADATA_TIMEOUT_S + moved_s + (MOUNT_DEADLINE_S if call.place in MOUNTS else 0.0)


def net_s(call: Call, pauses: Pauses) -> float:
    """Without the time in which nobody could answer."""
    return call.took_s - sum(
        max(0.0, min(call.end_s, end_s) - max(call.start_s, start_s)) for start_s, end_s in pauses.get(call.place, ())
    )


def lost_of(calls: Iterable[Call], events: Iterable[Event], root: str) -> list[str]:
    published: set[tuple[str, int]] = set()
    renamed: set[tuple[str, str]] = set()
    removed: Counter[str] = Counter()
    for event in events:
        path = event.path.removeprefix(root)
        if event.kind == "publish" and event.address is not None:
            published.add((path, event.address.length_bytes))
        elif event.kind == "rename":
            renamed.add((path, event.to_path.removeprefix(root)))
        elif event.kind == "remove":
            removed[path] += 1
    acknowledged = [call for call in calls if call.outcome == OK]
    removes = Counter(call.name for call in acknowledged if call.verb == "remove")
    return [
        *(_lost(c) for c in acknowledged if c.verb == "put" and (c.name, c.length_bytes) not in published),
        *(_lost(c) for c in acknowledged if c.verb == "rename" and (c.name, c.target) not in renamed),
        *(f"{n} removes of {name}, {removed[name]} known" for name, n in removes.items() if n > removed[name]),
    ]


def _lost(call: Call) -> str:
    return f"{call.actor} {call.verb} {call.name} {call.target} turn {call.turn}, {call.length_bytes} bytes"


OF_FILES: Final = frozenset({"publish", "rename", "remove", "evict"})
"""Kinds of event that change what a file's name holds."""
Row = Entry | KvError
"""What the master answers for a name."""


def unlike_journal(events: Iterable[Event], sequence: int, rows: Mapping[str, Row]) -> list[str]:
    """Names of which the master says something else than its journal does: what was committed is what holds.

    `rows` were asked for when the journal had come to `sequence`; names that changed behind it are left out. A file
    without a live replica is a miss, and there nevertheless.
    """
    lengths: dict[str, int | None] = {}
    changed_later = set[str]()
    for event in events:
        if event.sequence > sequence:
            changed_later |= {event.path, event.to_path}
        elif event.kind == "publish":
            lengths[event.path] = event.address.length_bytes if event.address else 0
        elif event.kind == "rename":
            lengths[event.to_path] = lengths.get(event.path)
            lengths[event.path] = None
        elif event.kind in ("remove", "evict"):
            lengths[event.path] = None
    return [
        f"{path}: {row if isinstance(row, KvError) else row.length_bytes}, by the journal {lengths.get(path)} bytes"
        for path, row in rows.items()
        if path not in changed_later and not _agree(lengths.get(path), row)
    ]


def _agree(length_bytes: int | None, row: Row) -> bool:
    """`length_bytes` None: there is nothing."""
    if isinstance(row, KvError):
        return isinstance(row, NotFound) and (row.reason == "no_replica" or length_bytes is None)
    return row.length_bytes == length_bytes


WINDOW_S: Final = 0.5
_BEFORE_S: Final = 5.0
_SHARE: Final = 0.8
"""Of the hit rate before: then it counts as back."""


def recovery_s(reads: Sequence[Call], start_s: float, end_s: float) -> float | None:
    """From the end of a fault until reads hit about as often as before it; negative: they did not, before the end of
    the run. `reads`: gets in order of their ends. None when too little was read before to tell.
    """
    ends = [read.end_s for read in reads]

    def rate(from_s: float, to_s: float) -> float | None:
        found = reads[bisect.bisect_left(ends, from_s) : bisect.bisect_left(ends, to_s)]
        return sum(read.outcome == OK for read in found) / len(found) if found else None

    before = rate(start_s - _BEFORE_S, start_s)
    if not before:
        return None
    at_s = end_s
    while ends and at_s + WINDOW_S <= ends[-1]:
        now = rate(at_s, at_s + WINDOW_S)
        if now is not None and now >= _SHARE * before:
            return at_s - end_s
        at_s += WINDOW_S / 2
    return -1.0
