"""The one guard around every FUSE operation.

In asyncio mode pyfuse3 swallows what a handler raises, unless it is a FUSEError: no reply, no log line, and the caller
hangs for ever (pyfuse3 issue 93). So every handler runs inside `guarded`: it has a deadline, every exception, a
cancellation included, ends as a log line and an errno, and before each reply what a successor needs is saved
(`commit`). `guarded_operations` wraps a whole class, so that nobody can forget one.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import inspect
import logging
import reprlib
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import pyfuse3

from kvstore.core.errors import KvError
from kvstore.core.limits import MOUNT_OPERATION_TIMEOUT_S

log = logging.getLogger(__name__)
C = TypeVar("C", bound=type)
Handler = Callable[..., Awaitable[Any]]

NO_REPLY: Final = frozenset({"forget"})
"""Handlers whose request has no answer: what goes wrong is logged, nothing is raised."""
NOT_HANDLERS: Final = frozenset({"init", "stacktrace"})
"""Synchronous hooks of pyfuse3."""


def handler_names() -> frozenset[str]:
    """Every request handler that pyfuse3 may call."""
    return (
        frozenset(
            name
            for name, value in vars(pyfuse3.Operations).items()
            if inspect.isfunction(value) and not name.startswith("_")
        )
        - NOT_HANDLERS
    )


def guarded_operations(cls: C) -> C:
    """Class decorator: every handler of `cls`, inherited ones too, runs inside the guard."""
    for name in handler_names():
        setattr(cls, name, guarded(getattr(cls, name)))
    return cls


def guarded(handler: Handler, timeout_s: float = MOUNT_OPERATION_TIMEOUT_S) -> Handler:
    """`handler` with a deadline, raising nothing but FUSEError; ``self.counts`` counts (name, "ok" or errno)."""
    name = handler.__name__

    @functools.wraps(handler)
    async def guard(*args: Any) -> Any:
        counts = args[0].counts
        try:
            async with asyncio.timeout(timeout_s):
                result = await handler(*args)
            args[0].commit()
            counts[name, "ok"] += 1
            return result
        except BaseException as error:  # noqa: BLE001 - the one guard
            code = errno_of(error)
            counts[name, errno.errorcode.get(code, str(code))] += 1
            _log(name, args[1:], error, code)
            _commit(args[0])
            if name in NO_REPLY:
                return None
            raise pyfuse3.FUSEError(code) from None

    guard.__dict__["guards"] = handler
    return guard


def _commit(operations: Any) -> None:
    try:
        operations.commit()
    except Exception:
        log.exception("what a successor needs could not be saved")


def is_guarded(handler: object) -> bool:
    return "guards" in getattr(handler, "__dict__", {})


def errno_of(error: BaseException) -> int:
    """What the caller of the operation gets."""
    if isinstance(error, pyfuse3.FUSEError):
        return error.errno
    if isinstance(error, KvError):
        return error.errno
    if isinstance(error, TimeoutError):  # before OSError, which it is too
        return errno.ETIMEDOUT
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    return errno.EIO


def _log(name: str, args: tuple[Any, ...], error: BaseException, code: int) -> None:
    """Answers are for the caller alone; failures get a line, bugs their trace."""
    extra = {"errno": errno.errorcode.get(code, code)}
    if isinstance(error, pyfuse3.FUSEError):
        return
    if isinstance(error, KvError):
        log.log(_level(code), "%s: %s", name, error.message, extra=extra)
    elif isinstance(error, TimeoutError | OSError):
        log.warning("%s: %s", name, str(error) or type(error).__name__, extra=extra)
    elif isinstance(error, asyncio.CancelledError):
        log.warning("%s was cancelled; its caller gets EIO", name)
    else:  # reprlib: a write's arguments hold a megabyte
        log.error("internal error in %s%s", name, reprlib.repr(args), exc_info=error)


def _level(code: int) -> int:
    """What a file system says every day (no such file, not empty) is no news."""
    return logging.WARNING if code in (errno.EIO, errno.ETIMEDOUT, errno.ENOSPC, errno.EAGAIN) else logging.DEBUG
