"""What happened to a name a short while ago."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.fuse.inodes import Key


class Recently:
    """Names, each for `ttl_s` after it was added; the oldest go when there are too many. Pure: time comes in."""

    def __init__(self, ttl_s: float, max_names: int = 10_000) -> None:
        self._ttl_s, self._max_names = ttl_s, max_names
        self._since_s: OrderedDict[Key, float] = OrderedDict()

    def add(self, key: Key, now_s: float) -> None:
        self._since_s[key] = now_s
        self._since_s.move_to_end(key)
        if len(self._since_s) > self._max_names:
            self._since_s.popitem(last=False)

    def discard(self, key: Key) -> None:
        self._since_s.pop(key, None)

    def has(self, key: Key, now_s: float) -> bool:
        since_s = self._since_s.get(key)
        return since_s is not None and now_s < since_s + self._ttl_s
