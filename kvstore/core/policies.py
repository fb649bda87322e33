"""Policies as a worker sees them (rule 30): a forest of rules, in which each block belongs to the nearest one. Pure.

What the master sends is only data: a parent that nobody knows, or a loop, ends the way up there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

NONE: Final = 0
"""The policy of a block that has none."""


class Rule(NamedTuple):
    """What one directory, or file, says of what is below it."""

    id: int
    parent: int = NONE
    """The nearest one above it."""
    ttl_s: float = 0.0
    """0 = none."""
    pinned: bool = False


class Table:
    """All rules, resolved once: every question costs O(1) but for `below`."""

    def __init__(self, rules: Iterable[Rule] = (), version: int = 0) -> None:
        self.version = version
        known = {rule.id: rule for rule in rules if rule.id != NONE}
        self._depth = {NONE: 0}
        self._ttl_s = {NONE: 0.0}
        self._pinned = {NONE: False}
        self._children: dict[int, list[int]] = {}
        for id, parent in _forest(known).items():
            rule = known[id]
            self._depth[id] = self._depth[parent] + 1
            self._ttl_s[id] = rule.ttl_s if _is_time(rule.ttl_s) else self._ttl_s[parent]
            self._pinned[id] = rule.pinned or self._pinned[parent]
            self._children.setdefault(parent, []).append(id)

    def is_pinned(self, policy: int) -> bool:
        """Whether it, or one above it, pins."""
        return self._pinned.get(policy, False)

    def ttl_s(self, policy: int) -> float:
        """Of the nearest one on the way up that has a TTL; 0 = none. What is pinned has none."""
        return 0.0 if self.is_pinned(policy) else self._ttl_s.get(policy, 0.0)

    def depth(self, policy: int) -> int:
        """How many rules are on the way up from it, itself counted; 0 for one that is not known."""
        return self._depth.get(policy, 0)

    def below(self, policy: int) -> list[int]:
        """It and all that are below it, each once."""
        found = [policy]
        for each in found:  # grows meanwhile
            found += self._children.get(each, ())
        return found


def _forest(rules: Mapping[int, Rule]) -> dict[int, int]:
    """Id → parent, parents first. Where a loop would close, or nobody knows the parent, it is `NONE`."""
    parents: dict[int, int] = {}
    for start in rules:
        path: dict[int, None] = {}
        at = start
        while at in rules and at not in parents and at not in path:
            path[at] = None
            at = rules[at].parent
        above = at if at in parents else NONE
        for id in reversed(path):
            parents[id] = above
            above = id
    return parents


def _is_time(ttl_s: float) -> bool:
    return math.isfinite(ttl_s) and ttl_s > 0
