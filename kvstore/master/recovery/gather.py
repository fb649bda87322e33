"""Claims as the workers tell them, gathered in the column `claims`: of each block the best one, whatever the order
(rule 22). Pure; `claims` places them in the tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvstore.core import paths
from kvstore.core.errors import InvalidRequest
from kvstore.core.types import U63_MAX, Seen
from kvstore.master.namespace import blocks
from kvstore.master.namespace.cluster import Cluster
from kvstore.master.recovery.claims import BEST, Claim, NotedName, Outcome, claim_key, hold, unnamed_key
from kvstore.master.storage.change import Change
from kvstore.master.storage.db import Cf
from kvstore.master.storage.records import ClaimRow, dump, pack_u64, unpack_u64

MAX_CLAIMS: Final = 1024
"""In one message."""
OUTCOMES: Final = (Outcome.CLAIMED, Outcome.WITHOUT_NOTE, Outcome.MALFORMED, Outcome.KNOWN, Outcome.DEAD)
"""What a claim can come to here."""
U32_MAX: Final = 2**32 - 1


def check(claims: Sequence[Claim]) -> None:
    """Raises InvalidRequest for a page that is too large. What is wrong with one claim is its own affair: a worker
    whose page is refused sends it again, for ever."""
    if len(claims) > MAX_CLAIMS:
        raise InvalidRequest(f"{len(claims)} blocks are too many for one page; at most {MAX_CLAIMS}")


def take(
    change: Change, cluster: Cluster, node: str, claims: Iterable[Claim], is_ahead: Callable[[Seen], bool]
) -> Counter[Outcome]:
    """Keep the claims of one page, and note who holds the blocks. Any number of times, in any order.

    `is_ahead`: whether the database lacks this point of the history; of what it has it knows the end.
    """
    return Counter(_take(change, cluster, node, claim, is_ahead) for claim in claims)


def _take(change: Change, cluster: Cluster, node: str, claim: Claim, is_ahead: Callable[[Seen], bool]) -> Outcome:
    block = claim.address.block.pack()
    row = blocks.read(change, block)
    if row is not None and row.dead:
        return Outcome.DEAD  # for ever: never owned again (rule 10)
    if row is None:
        change.put(Cf.CLAIMS, unnamed_key(claim.volume, block), pack_u64(claim.address.length_bytes))
    else:
        hold(change, cluster, node, block, row, claim.volume)
        change.delete(Cf.CLAIMS, unnamed_key(claim.volume, block))
    return _noted(change, claim, block, is_ahead)


def _noted(change: Change, claim: Claim, block: bytes, is_ahead: Callable[[Seen], bool]) -> Outcome:
    name = claim.name
    if not 0 < claim.address.length_bytes <= U63_MAX:
        return Outcome.MALFORMED
    if name is None:
        return Outcome.WITHOUT_NOTE
    if not _is_sound(name):
        return Outcome.MALFORMED
    if not is_ahead(name.at):
        return Outcome.KNOWN
    _keep_best(change, claim, name, block)
    return Outcome.CLAIMED


def _is_sound(name: NotedName) -> bool:
    """Whether a worker of ours can have noted this."""
    times = max(abs(name.mtime_ns), abs(name.ctime_ns))
    if max(name.at.sequence, times) > U63_MAX or max(name.mode, name.uid, name.gid) > U32_MAX:
        return False
    try:
        return bool(paths.split(name.path))
    except (InvalidRequest, UnicodeEncodeError):
        return False


def _keep_best(change: Change, claim: Claim, name: NotedName, block: bytes) -> None:
    """The later one; of two from the same moment, which no honest workers tell differently, always the same one."""
    new = dump(
        ClaimRow(
            name.path, name.mode, name.uid, name.gid, name.mtime_ns, name.ctime_ns, name.at.incarnation,
            claim.address.length_bytes, claim.address.hash, claim.volume,
        )
    )  # fmt: skip
    sequence, stored = name.at.sequence, change.get(Cf.CLAIMS, BEST + block)
    if stored is not None:
        before = claim_key(unpack_u64(stored), block)
        if (sequence, new) <= (unpack_u64(stored), change.get(Cf.CLAIMS, before) or b""):
            return
        change.delete(Cf.CLAIMS, before)
    change.put(Cf.CLAIMS, BEST + block, pack_u64(sequence))
    change.put(Cf.CLAIMS, claim_key(sequence, block), new)
