"""Links whose channel ends or is lost under a call: only KvErrors come out, and a lost server is found again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from kvstore.core.errors import KvError, Timeout, Unavailable
from kvstore.pb import master_pb2 as m
from kvstore.pb import worker_pb2 as w
from kvstore.rpc import methods
from kvstore.rpc.link import REPLACE_AFTER_S, AsyncLink, Link
from kvstore.rpc.metadata import Caller


@pytest.fixture
def silent() -> Iterator[str]:
    """Accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def all_verbs(link: AsyncLink, timeout_s: float) -> list[KvError]:
    """Every verb at once; what they raise."""

    async def drain(pages: object) -> None:
        async for _ in pages:  # type: ignore[attr-defined]
            pass

    calls = (
        link.call(methods.LOOKUP, m.LookupRequest(), timeout_s),
        drain(link.stream(methods.LIST, m.ListRequest(), timeout_s)),
        drain(link.read_frames(w.ReadRequest(), timeout_s)),
        link.write_frames(w.WriteRequest(), [b"x"], timeout_s),
    )
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(r, KvError) for r in results), results
    return [r for r in results if isinstance(r, KvError)]


async def test_a_channel_that_is_closed_under_calls_is_unavailable_not_cancelled(silent: str) -> None:
    link = AsyncLink(silent, Caller())
    calls = asyncio.create_task(all_verbs(link, 10.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await link.close()
    assert {type(e) for e in await calls} == {Unavailable}
    assert {type(e) for e in await all_verbs(link, 10.0)} == {Unavailable}


async def test_a_caller_that_is_cancelled_is_cancelled(silent: str) -> None:
    link = AsyncLink(silent, Caller())
    call = asyncio.create_task(link.call(methods.LOOKUP, m.LookupRequest(), 10.0))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await link.close()


async def test_no_answer_is_a_timeout_or_unavailable(silent: str) -> None:
    link = AsyncLink(silent, Caller())
    assert {type(e) for e in await all_verbs(link, 0.05)} <= {Timeout, Unavailable}
    await link.close()


def test_a_closed_link_of_threads_is_unavailable(silent: str) -> None:
    link = Link(silent, Caller())
    link.close()
    with pytest.raises(Unavailable):
        link.call(methods.LOOKUP, m.LookupRequest(), 10.0)
    with pytest.raises(Unavailable):
        list(link.stream(methods.LIST, m.ListRequest(), 10.0))
    with pytest.raises(Unavailable):
        list(link.read_frames(w.ReadRequest(), 10.0))
    with pytest.raises(Unavailable):
        link.write_frames(w.WriteRequest(), [b"x"], 10.0)


def test_a_channel_whose_connection_failed_is_replaced_once_for_all_who_saw_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = f"127.0.0.1:{server.getsockname()[1]}"
    link = Link(dead, Caller())
    first = link._wire
    with pytest.raises(Unavailable):
        link.call(methods.LOOKUP, m.LookupRequest(), 5.0)
    assert link._wire is first, "it is too young"
    monkeypatch.setattr(type(first), "age_s", REPLACE_AFTER_S)
    with pytest.raises(Unavailable):
        link.call(methods.LOOKUP, m.LookupRequest(), 5.0)
    second = link._wire
    assert second is not first
    link._replace(first)  # another thread that saw it fail
    assert link._wire is second
    link.close()
