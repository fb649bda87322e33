"""A small HTTP server for metrics and health on the process's own loop: GET and HEAD of fixed paths, one a connection.

It trusts nobody: the request's head is bounded in size and time, the number of connections too (the oldest makes way
for one more), and bad input is answered 400. A body is never read. It has no thread and no dependencies.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from kvstore.config.units import HostPort
from kvstore.core.errors import Unavailable
from kvstore.obs.metrics import CONTENT_TYPE, Metrics

log = logging.getLogger(__name__)

MAX_HEAD_BYTES: Final = 8192
MAX_CONNECTIONS: Final = 64
HEAD_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 5.0
SEND_TIMEOUT_S: Final = 5.0


class Response(NamedTuple):
    """What a route answers. ``body`` is bytes of ``content_type``."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Route = Callable[[], Awaitable[Response]]
Problem = Callable[[], str | None]
"""None when all is well, else one line that says what is not."""


def health_routes(metrics: Metrics, alive: Problem, ready: Problem) -> dict[str, Route]:
    """``/metrics``; ``/healthz`` (restart me if not), ``/readyz`` (send me nothing if not): 200, or 503 with a line."""

    async def scrape() -> Response:
        return Response(200, metrics.render(), CONTENT_TYPE)

    return {"/metrics": scrape, "/healthz": _problem_route(alive), "/readyz": _problem_route(ready)}


def _problem_route(problem: Problem) -> Route:
    async def answer() -> Response:
        text = problem()
        return Response(200, b"ok\n") if text is None else Response(503, f"{text}\n".encode())

    return answer


class BadRequest(Exception):
    """The request is answered with ``status`` and goes no further."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status


class HttpServer:
    """Serves ``routes`` (path → route) until `close`. ``head_timeout_s`` is for tests."""

    def __init__(self, routes: Mapping[str, Route], head_timeout_s: float = HEAD_TIMEOUT_S) -> None:
        self._routes = dict(routes)
        self._head_timeout_s = head_timeout_s
        self._server: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        """In order of their arrival."""

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port, which the kernel chose if it was 0. Raises OSError when it is taken."""
        # StreamReader's limit bounds readuntil(); past it the request is refused.
        self._server = await asyncio.start_server(self._accept, host, port, limit=MAX_HEAD_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and drop the connections that are open."""
        if self._server is None:
            return
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A plain function, so that the task is ours to bound and to cancel.
        if len(self._tasks) >= MAX_CONNECTIONS:  # those who say nothing must not keep a probe of our health out
            self._tasks.pop(next(iter(self._tasks))).transport.abort()
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks[task] = writer
        task.add_done_callback(lambda task: self._tasks.pop(task, None))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            response, with_body = await self._respond(reader)
            writer.write(encode(response, with_body))
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            log.debug("connection ended early", exc_info=True)
        finally:
            # Idempotent after a clean close; frees the socket at once on every other way out.
            writer.transport.abort()

    async def _respond(self, reader: asyncio.StreamReader) -> tuple[Response, bool]:
        try:
            method, path = await self._read_request(reader)
        except BadRequest as error:
            return _refusal(error.status), True
        route = self._routes.get(path)
        return await self._answer(path, route) if route else _refusal(404), method == "GET"

    async def _read_request(self, reader: asyncio.StreamReader) -> tuple[str, str]:
        try:
            async with asyncio.timeout(self._head_timeout_s):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            raise BadRequest(408) from None
        except asyncio.LimitOverrunError:
            raise BadRequest(400) from None
        except asyncio.IncompleteReadError as error:
            if not error.partial:
                raise
            raise BadRequest(400) from None
        return parse_request_line(head.partition(b"\r\n")[0])

    async def _answer(self, path: str, route: Route) -> Response:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await route()
        except TimeoutError:
            log.warning("no answer to %s within %s s", path, ANSWER_TIMEOUT_S)
            return Response(503, b"timeout\n")
        except Exception:
            log.exception("answering %s failed", path)
            return Response(500, b"internal error, see the log\n")


async def serve(address: HostPort | None, routes: Mapping[str, Route]) -> tuple[HttpServer, str]:
    """(server, the ``host:port`` it was really bound to); without an address nothing listens, and that is "".

    Raises Unavailable in one line when the address is taken.
    """
    server = HttpServer(routes)
    if address is None:
        return server, ""
    try:
        port = await server.start(*address)
    except OSError as error:
        raise Unavailable(
            f"cannot listen on {address} for HTTP: {error.strerror}; choose another with --http"
        ) from None
    return server, str(HostPort(address.host, port))


def parse_request_line(line: bytes) -> tuple[str, str]:
    """(method, path without query) of a request's first line; raises `BadRequest`."""
    parts = line.split(b" ")
    if len(parts) != 3 or parts[2] not in (b"HTTP/1.1", b"HTTP/1.0") or not line.isascii():
        raise BadRequest(400)
    method, target = parts[0].decode(), parts[1].decode()
    if not (method.isalpha() and method.isupper() and target.startswith("/")):
        raise BadRequest(400)
    if method not in ("GET", "HEAD"):
        raise BadRequest(405)
    return method, target.partition("?")[0]


def _refusal(status: int) -> Response:
    return Response(status, f"{http.HTTPStatus(status).phrase}\n".encode())


def encode(response: Response, with_body: bool = True) -> bytes:
    """The bytes of an answer that closes its connection."""
    head = [
        f"HTTP/1.1 {response.status} {http.HTTPStatus(response.status).phrase}",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(response.body)}",
        "Connection: close",
        *(["Allow: GET, HEAD"] if response.status == 405 else []),
    ]
    return "\r\n".join([*head, "", ""]).encode("ascii") + (response.body if with_body else b"")
