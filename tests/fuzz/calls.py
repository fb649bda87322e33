"""Calling a servicer's methods in the test's process: bytes in, a reply or a typed error out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NoReturn

import grpc.aio

from kvstore.rpc.methods import Method
from kvstore.rpc.status import CODE_KEY

INTERNAL: Final = "1"
"""Code of an error that nobody has foreseen."""


class Refused(Exception):
    """The call ended with this error code."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code


class Context:
    """What a handler sees of a call."""

    def __init__(self, metadata: Iterable[tuple[str, str]] = ()) -> None:
        self._metadata = tuple(metadata)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    async def abort(self, status: grpc.StatusCode, details: str, trailing: Iterable[tuple[str, str]]) -> NoReturn:
        raise Refused(dict(trailing)[CODE_KEY], details)


async def call(servicer: Any, method: Method[Any, Any], data: bytes) -> list[Any] | None:
    """The replies to a request in its bytes, each as it comes from the wire; None when it was refused, as it may be.

    Raises Refused for an internal error: something came out of a handler that is no KvError.
    """
    handler = getattr(servicer, method.path.rpartition("/")[2])
    result = handler(method.request.FromString(data), Context())
    try:
        replies = [reply async for reply in result] if hasattr(result, "__aiter__") else [await result]
    except Refused as refused:
        if refused.code == INTERNAL:
            raise
        return None
    return [type(reply).FromString(reply.SerializeToString()) for reply in replies]
