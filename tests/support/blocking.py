"""An `AsyncClient` with the face of a `Client`: its loop runs in a thread, so that one suite serves both."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from kvstore.client.aio import AsyncClient

T = TypeVar("T")
CALL_TIMEOUT_S = 30.0


class LoopThread:
    """One loop in a thread of its own. One for all clients: grpc.aio in two loops at once floods the log."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop")
        self._thread.start()

    def run(self, awaitable: Awaitable[T]) -> T:
        async def wait() -> T:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result(CALL_TIMEOUT_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingClient:
    """Calls are those of `AsyncClient`; coroutines are awaited, asynchronous generators iterated."""

    def __init__(self, loop: LoopThread, url: str, **options: Any) -> None:
        self._loop = loop
        self._client = loop.run(_make(url, options))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._client, name)
        return self._call(attribute) if callable(attribute) else attribute

    def close(self) -> None:
        self._loop.run(self._client.close())

    def _call(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if inspect.isasyncgen(result):
                return self._iterate(cast("AsyncGenerator[Any, None]", result))
            return self._loop.run(result) if inspect.iscoroutine(result) else result

        return call

    def _iterate(self, rows: AsyncGenerator[Any, None]) -> Iterator[Any]:
        try:
            while True:
                yield self._loop.run(anext(rows))
        except StopAsyncIteration:
            return
        finally:
            self._loop.run(rows.aclose())


async def _make(url: str, options: dict[str, Any]) -> AsyncClient:
    return AsyncClient(url, **options)
