"""Callbacks that keep nobody alive: what a thread or a loop calls must not hold a client that was dropped without
`close`.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable
from typing import ParamSpec

P = ParamSpec("P")


def weakly(method: Callable[P, object]) -> Callable[P, None]:
    """A bound method without a reference to its object; a call does nothing once that is gone."""
    weak = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if bound := weak():
            bound(*args, **kwargs)

    return call


def weakly_async(method: Callable[P, Awaitable[object]]) -> Callable[P, Awaitable[None]]:
    """Likewise; its object lives while it is awaited."""
    weak = weakref.WeakMethod(method)

    async def call(*args: P.args, **kwargs: P.kwargs) -> None:
        if bound := weak():
            await bound(*args, **kwargs)

    return call
