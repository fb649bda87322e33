"""A TCP relay in a thread that lets each piece wait: this kernel has no netem."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Final, Self

_PIECE_BYTES: Final = 1 << 16
_QUEUED: Final = 64
"""Pieces on their way in one direction: beyond them the sender is held back."""
_JOIN_TIMEOUT_S: Final = 10.0


class Proxy:
    """Listens on `host`, any port, and connects to (host, port) `target`. Both directions wait `delay_s`."""

    def __init__(self, host: str, target: tuple[str, int]) -> None:
        self._host, self._target = host, target
        self._delay_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)
        self._listening = threading.Event()
        self._stop = asyncio.Event()
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._listening.wait(_JOIN_TIMEOUT_S):
            raise TimeoutError("the proxy does not listen")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_JOIN_TIMEOUT_S)

    @contextmanager
    def delay(self, delay_s: float) -> Iterator[None]:
        self._delay_s = delay_s
        try:
            yield
        finally:
            self._delay_s = 0.0

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as relays:

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                relays.create_task(self._relay(reader, writer))

            server = await asyncio.start_server(accept, self._host, 0)
            self.port = server.sockets[0].getsockname()[1]
            self._listening.set()
            await self._stop.wait()
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; when either direction ends, or nobody listens at the target, both do."""
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            writers.append(far_writer)
            ways = [self._pump(reader, far_writer), self._pump(far_reader, writer)]
            tasks = [asyncio.ensure_future(way) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except OSError:
            return
        finally:
            for each in writers:
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pieces leave in order, none before its time; delay is not a rate: many are on their way at once."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED)

        async def send() -> None:
            while True:
                due_s, piece = await on_the_way.get()
                await asyncio.sleep(due_s - time.monotonic())
                if not piece:
                    return
                writer.write(piece)
                await writer.drain()

        sending = asyncio.ensure_future(send())
        try:
            piece = b"."
            while piece and not sending.done():
                piece = await reader.read(_PIECE_BYTES)
                await on_the_way.put((time.monotonic() + self._delay_s, piece))
            await sending
        finally:
            sending.cancel()
