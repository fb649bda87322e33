"""What happened to a thing a short while ago. Pure: time comes in as monotonic seconds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Recently(Generic[K]):
    """Keys, each for `ttl_s` after it was added; the oldest go when there are more than `max_keys`."""

    def __init__(self, ttl_s: float, max_keys: int = 10_000) -> None:
        self._ttl_s, self._max_keys = ttl_s, max_keys
        self._since_s: OrderedDict[K, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._since_s)

    def add(self, key: K, now_s: float) -> None:
        self._since_s[key] = now_s
        self._since_s.move_to_end(key)
        if len(self._since_s) > self._max_keys:
            self._since_s.popitem(last=False)

    def discard(self, key: K) -> None:
        self._since_s.pop(key, None)

    def has(self, key: K, now_s: float) -> bool:
        since_s = self._since_s.get(key)
        return since_s is not None and now_s < since_s + self._ttl_s
