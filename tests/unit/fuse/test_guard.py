"""The guard: whatever a handler does, its caller gets an answer."""

from __future__ import annotations

import asyncio
import errno
import inspect
from collections import Counter

import pytest

pyfuse3 = pytest.importorskip("pyfuse3")

from kvstore.core import errors  # noqa: E402
from kvstore.fuse import guard  # noqa: E402
from kvstore.fuse.ops import Operations  # noqa: E402


class Mount:
    """What the guard needs of the handlers' object."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.commits = 0

    def commit(self) -> None:
        self.commits += 1


async def code_of(error: BaseException) -> int:
    async def handler(self: Mount) -> None:
        raise error

    mount = Mount()
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await guard.guarded(handler)(mount)
    code = int(caught.value.errno)
    assert mount.counts == {("handler", errno.errorcode[code]): 1}
    assert mount.commits == 1
    return code


@pytest.mark.allow_errors("internal error in handler")
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.NotFound(), errno.ENOENT),
        (errors.Timeout(), errno.ETIMEDOUT),
        (errors.Unavailable(), errno.EIO),
        (errors.NoSpace(), errno.ENOSPC),
        (errors.KvError(), errno.EIO),
        (OSError(errno.EFBIG, "big"), errno.EFBIG),
        (OSError("no number"), errno.EIO),
        (TimeoutError(), errno.ETIMEDOUT),
        (ZeroDivisionError(), errno.EIO),
        (SystemExit(1), errno.EIO),
        (asyncio.CancelledError(), errno.EIO),
    ],
    ids=repr,
)
async def test_every_exception_is_an_errno(error: BaseException, code: int) -> None:
    assert await code_of(error) == code


async def test_an_errno_passes_unchanged() -> None:
    assert await code_of(pyfuse3.FUSEError(errno.EXDEV)) == errno.EXDEV


async def test_a_handler_that_waits_for_ever_has_a_deadline() -> None:
    async def handler(self: Mount) -> None:
        await asyncio.Event().wait()

    with pytest.raises(pyfuse3.FUSEError) as caught:
        await guard.guarded(handler, timeout_s=0.01)(Mount())
    assert caught.value.errno == errno.ETIMEDOUT


async def test_a_cancelled_task_still_answers() -> None:
    entered = asyncio.Event()

    async def handler(self: Mount) -> None:
        entered.set()
        await asyncio.Event().wait()

    task: asyncio.Future[None] = asyncio.ensure_future(guard.guarded(handler)(Mount()))
    await entered.wait()
    task.cancel()
    with pytest.raises(pyfuse3.FUSEError):
        await task


@pytest.mark.allow_errors("internal error in forget")
async def test_forget_has_no_answer_and_raises_nothing() -> None:
    async def forget(self: Mount) -> None:
        raise ZeroDivisionError

    assert await guard.guarded(forget)(Mount()) is None


async def test_what_went_well_is_counted() -> None:
    async def handler(self: Mount) -> int:
        return 5

    mount = Mount()
    assert await guard.guarded(handler)(mount) == 5
    assert mount.counts == {("handler", "ok"): 1}
    assert mount.commits == 1


def test_every_handler_that_pyfuse3_may_call_is_guarded() -> None:
    names = guard.handler_names()
    assert {"lookup", "read", "write", "rename", "forget", "poll", "readdir"} <= names
    assert [name for name in names if not guard.is_guarded(getattr(Operations, name))] == []
    assert not guard.is_guarded(Operations.init)


def test_handlers_take_what_pyfuse3_gives() -> None:
    for name in guard.handler_names():
        ours = inspect.signature(getattr(Operations, name)).parameters
        theirs = inspect.signature(getattr(pyfuse3.Operations, name)).parameters
        assert list(ours) == list(theirs), name


def test_only_poll_is_left_to_the_kernel() -> None:
    """What we do not define raises ENOSYS, after which the kernel never asks again."""
    ours = {name for cls in Operations.__mro__[:1] for name in vars(cls)}
    inherited = {
        n for n in guard.handler_names() if getattr(Operations, n).__wrapped__ is getattr(pyfuse3.Operations, n)
    }
    assert inherited == {"poll"}
    assert ours >= guard.handler_names()
