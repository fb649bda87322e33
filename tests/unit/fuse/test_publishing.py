"""What is published: sealed first, unless the master is known to be away."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.core.errors import Unavailable
from kvstore.fuse.publishing import Publisher

DIRECTORY, NAME = 1, "f"


class Area:
    """Counts what it is asked to seal."""

    def __init__(self) -> None:
        self.seals = 0

    async def notice(self, file: Any) -> None:
        return

    async def seal(self, file: Any) -> None:
        self.seals += 1


class Away:
    """The mount's link to a master that did not answer a moment ago, or to one that then does not."""

    def __init__(self, *, is_known: bool) -> None:
        self._is_known = is_known

    def check(self) -> None:
        if self._is_known:
            raise Unavailable("known to be away")

    async def publish(self, *wanted: Any) -> None:
        raise Unavailable("does not answer")


@pytest.mark.parametrize(("is_known", "seals"), [(True, 0), (False, 1)])
async def test_nothing_is_sealed_for_a_master_that_is_known_to_be_away(is_known: bool, seals: int) -> None:
    tree = SimpleNamespace(
        master=Away(is_known=is_known), unreadable=SimpleNamespace(has=lambda *key: False), now_s=float
    )
    area, saved = Area(), SimpleNamespace(touch=lambda file: None, commit=lambda: None)
    publisher = Publisher(cast("Any", tree), cast("Any", area), cast("Any", None), cast("Any", saved))
    file = SimpleNamespace(
        lock=asyncio.Lock(), changes=1, permissions=0o644, uid=0, gid=0, keep_mtime=False, mtime_ns=0
    )
    with pytest.raises(Unavailable):
        await publisher.rename(cast("Any", file), (DIRECTORY, NAME), no_replace=False)
    assert area.seals == seals
