"""kvstore: an L2 KV-cache pool for LLM serving.

``from kvstore import Client, AsyncClient``; every error is a `KvError`. The clients are imported when they are first
named: grpc costs 81 ms, and processes that only relay or supervise need none of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from kvstore.core.errors import (
    AlreadyExists,
    Corrupt,
    Denied,
    InvalidRequest,
    IsDirectory,
    KvError,
    NameTooLong,
    NoSpace,
    NotDirectory,
    NotEmpty,
    NotFound,
    OtherPolicy,
    Overloaded,
    ReadOnly,
    Stale,
    Timeout,
    TooLarge,
    Unavailable,
    Unsupported,
)

if TYPE_CHECKING:
    from kvstore.client.aio import AsyncClient
    from kvstore.client.aio import connect as connect_async
    from kvstore.client.sync import Client, connect

__version__: Final = "0.1.0"

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "Client",
    "Corrupt",
    "Denied",
    "InvalidRequest",
    "IsDirectory",
    "KvError",
    "NameTooLong",
    "NoSpace",
    "NotDirectory",
    "NotEmpty",
    "NotFound",
    "OtherPolicy",
    "Overloaded",
    "ReadOnly",
    "Stale",
    "Timeout",
    "TooLarge",
    "Unavailable",
    "Unsupported",
    "__version__",
    "connect",
    "connect_async",
]

_LAZY: Final = {
    "AsyncClient": ("kvstore.client.aio", "AsyncClient"),
    "Client": ("kvstore.client.sync", "Client"),
    "connect": ("kvstore.client.sync", "connect"),
    "connect_async": ("kvstore.client.aio", "connect"),
}


def __getattr__(name: str) -> Any:
    """Import a client on first use (PEP 562); the name is kept, so this runs once for each."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
