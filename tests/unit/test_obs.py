"""Log lines, metrics and their HTTP port."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.obs import http
from kvstore.obs import logging as obs_logging
from kvstore.obs.http import HttpServer, Response, health_routes
from kvstore.obs.metrics import Metrics


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, own = logging.getLogger(), logging.getLogger("kvstore")
    before = root.handlers[:], root.level, own.level
    yield io.StringIO()
    root.handlers[:], level, own_level = before
    root.setLevel(level)
    own.setLevel(own_level)
    logging.captureWarnings(False)


class TestLogging:
    def test_text(self, stream: io.StringIO) -> None:
        obs_logging.setup("worker", stream=stream)
        logging.getLogger("kvstore.worker.reports.report").info("sent %d", 3, extra={"full": True})
        line = stream.getvalue()
        assert line.endswith("] kvstore.worker.reports.report: sent 3 full=True\n")
        assert " INFO worker[" in line
        assert line[10] == "T"
        assert line[23] == "Z"

    def test_json(self, stream: io.StringIO) -> None:
        obs_logging.setup("master", format="json", stream=stream)
        logging.getLogger("kvstore.master").warning("café\n%s", "x", extra={"sequence": 7, "level": "mine"})
        (line,) = stream.getvalue().splitlines()
        fields = json.loads(line)
        assert (fields["message"], fields["level"], fields["component"]) == ("café\nx", "warning", "master")
        assert (fields["logger"], fields["sequence"]) == ("kvstore.master", 7)

    @pytest.mark.allow_errors("went wrong")
    @pytest.mark.parametrize("format", ["text", "json"])
    def test_exceptions(self, stream: io.StringIO, format: str) -> None:
        obs_logging.setup("master", format="json" if format == "json" else "text", stream=stream)
        try:
            raise ValueError("inner")
        except ValueError:
            logging.getLogger("kvstore").exception("went wrong")
        assert "ValueError: inner" in stream.getvalue()
        assert (len(stream.getvalue().splitlines()) == 1) == (format == "json")

    def test_a_file_name_cannot_forge_a_line(self, stream: io.StringIO) -> None:
        obs_logging.setup("mount", stream=stream)
        logging.getLogger("kvstore").info("open %s", "a\n2026 ERROR \x1b[31m\u202e")
        assert stream.getvalue().count("\n") == 1
        assert r"a\n2026 ERROR \x1b[31m\u202e" in stream.getvalue()

    def test_levels(self, stream: io.StringIO) -> None:
        obs_logging.setup("mount", level="debug", stream=stream)
        logging.getLogger("kvstore.x").debug("ours")
        logging.getLogger("asyncio").info("theirs, chatty")
        logging.getLogger("asyncio").warning("theirs, serious")
        assert [line.split(": ")[1] for line in stream.getvalue().splitlines()] == ["ours", "theirs, serious"]

    def test_a_second_setup_replaces_the_first_and_spares_others(self, stream: io.StringIO) -> None:
        other = logging.NullHandler()
        logging.getLogger().addHandler(other)
        obs_logging.setup("a", stream=io.StringIO())
        obs_logging.setup("b", stream=stream)
        logging.getLogger("kvstore").info("once")
        assert stream.getvalue().count("once") == 1
        assert other in logging.getLogger().handlers

    def test_warnings_go_to_the_log(self, stream: io.StringIO) -> None:
        obs_logging.setup("a", stream=stream)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(True)
            warnings.warn("old call", stacklevel=1)
        assert "old call" in stream.getvalue()

    def test_standard_error_by_default(self, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stderr", stream)
        obs_logging.setup("a")
        logging.getLogger("kvstore").info("here")
        assert "here" in stream.getvalue()


def samples(metrics: Metrics) -> dict[str, float]:
    """``name{label=value}`` → number of everything that the text says."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


class TestMetrics:
    def test_kinds(self) -> None:
        metrics = Metrics("worker", "1.2")
        metrics.counter("reads", "Reads.", ["source"]).labels("peer").inc(3)
        metrics.gauge("used_bytes", "Used.").set(5)
        metrics.histogram("open_seconds", "Open.").observe(0.3)
        found = samples(metrics)
        assert found["kvstore_reads_total{source=peer}"] == 3
        assert found["kvstore_used_bytes{}"] == 5
        assert found["kvstore_open_seconds_bucket{le=0.5}"] == 1
        assert found["kvstore_open_seconds_bucket{le=0.25}"] == 0
        assert found["kvstore_build_info{component=worker,version=1.2}"] == 1
        assert found["kvstore_process_resident_memory_bytes{}"] > 1e6

    def test_watched_values_are_read_when_asked(self) -> None:
        metrics, volumes = Metrics("worker", "1"), {"a": 1.0}
        metrics.watch("queue", "Queue.", lambda: len(volumes))
        metrics.watch_many("free_bytes", "Free.", ["volume"], lambda: [([v], n) for v, n in volumes.items()])
        assert samples(metrics)["kvstore_free_bytes{volume=a}"] == 1
        volumes.clear()
        volumes.update({"b": 2, "c": 3})
        found = samples(metrics)
        assert found["kvstore_queue{}"] == 2
        assert found["kvstore_free_bytes{volume=b}"] == 2
        assert "kvstore_free_bytes{volume=a}" not in found

    def test_counters_that_are_counted_elsewhere(self) -> None:
        metrics, counts = Metrics("worker", "1"), {"a": 1.0}
        metrics.count("reads", "Reads.", lambda: sum(counts.values()))
        metrics.count_many("moves", "Moves.", ["tier"], lambda: [([tier], n) for tier, n in counts.items()])
        assert (samples(metrics)["kvstore_reads_total{}"], samples(metrics)["kvstore_moves_total{tier=a}"]) == (1, 1)
        counts["b"] = 4
        found = samples(metrics)
        assert (found["kvstore_reads_total{}"], found["kvstore_moves_total{tier=b}"]) == (5, 4)
        assert b"# TYPE kvstore_moves_total counter" in metrics.render()

    def test_two_in_one_process(self) -> None:
        for component in ("master", "worker"):
            Metrics(component, "1").counter("calls", "Calls.")

    def test_a_name_is_registered_once(self) -> None:
        metrics = Metrics("worker", "1")
        metrics.watch("queue", "Queue.", lambda: 1)
        with pytest.raises(ValueError, match="kvstore_queue"):
            metrics.gauge("queue", "Queue.")


class Site:
    """A server with the usual routes, one that fails and one that hangs; `ask` sends raw bytes."""

    def __init__(self) -> None:
        self.problem: str | None = None
        routes = health_routes(Metrics("master", "1"), lambda: None, lambda: self.problem)
        self.server = HttpServer({**routes, "/fails": self._fail, "/hangs": self._hang}, head_timeout_s=0.2)
        self.port = 0

    async def _fail(self) -> Response:
        raise RuntimeError("broken route")

    async def _hang(self) -> Response:
        await asyncio.sleep(60)
        raise AssertionError

    async def ask(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            async with asyncio.timeout(5):
                return await reader.read()
        finally:
            writer.close()

    async def get(self, path: str) -> bytes:
        return await self.ask(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


async def ended(asking: Awaitable[bytes]) -> bool:
    """The connection ended without an answer; an orderly end is as good as a reset."""
    try:
        return await asking == b""
    except ConnectionError:
        return True


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    site.port = await site.server.start("127.0.0.1", 0)
    yield site
    await site.server.close()


class TestHttp:
    async def test_metrics(self, site: Site) -> None:
        head, _, body = (await site.get("/metrics")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=")
        assert f"Content-Length: {len(body)}".encode() in head
        assert b"kvstore_build_info" in body

    async def test_health_and_readiness(self, site: Site) -> None:
        assert (await site.get("/healthz")).endswith(b"\r\n\r\nok\n")
        site.problem = "no worker yet"
        answer = await site.get("/readyz")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert answer.endswith(b"\r\n\r\nno worker yet\n")
        assert (await site.get("/healthz?x=1")).startswith(b"HTTP/1.1 200 ")

    async def test_head_has_no_body(self, site: Site) -> None:
        for path, status in ((b"/healthz", b"200"), (b"/nothing", b"404")):
            answer = await site.ask(b"HEAD " + path + b" HTTP/1.0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert answer.endswith(b"\r\n\r\n")

    @pytest.mark.parametrize(
        ("request_bytes", "status"),
        [
            (b"GET /nothing HTTP/1.1\r\n\r\n", b"404"),
            (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405"),
            (b"GET metrics HTTP/1.1\r\n\r\n", b"400"),
            (b"GET /metrics\r\n\r\n", b"400"),
            (b"GET /metrics HTTP/9\r\n\r\n", b"400"),
            (b"get /metrics HTTP/1.1\r\n\r\n", b"400"),
            (b"GET /\xff HTTP/1.1\r\n\r\n", b"400"),
            (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
            (b"\r\n\r\n", b"400"),
            (b"GET /" + b"x" * http.MAX_HEAD_BYTES, b"400"),
            (b"GET /metrics HTTP/1.1\r\n", b"408"),
        ],
    )
    async def test_bad_input(self, site: Site, request_bytes: bytes, status: bytes) -> None:
        assert (await site.ask(request_bytes)).startswith(b"HTTP/1.1 " + status)

    async def test_a_half_request_that_ends(self, site: Site) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        writer.write(b"GET /metr")
        writer.write_eof()
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()

    async def test_whoever_connects_and_leaves_disturbs_nobody(self, site: Site) -> None:
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", site.port)
            writer.transport.abort()
        assert (await site.get("/healthz")).startswith(b"HTTP/1.1 200 ")

    @pytest.mark.allow_errors("answering /fails failed")
    async def test_a_route_that_fails(self, site: Site) -> None:
        answer = await site.get("/fails")
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert b"broken route" not in answer

    async def test_a_route_that_hangs(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http, "ANSWER_TIMEOUT_S", 0.05)
        assert (await site.get("/hangs")).startswith(b"HTTP/1.1 503 ")

    async def test_connections_are_bounded_and_the_oldest_makes_way(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http, "MAX_CONNECTIONS", 2)
        (oldest, a), (other, b) = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(2)]
        assert (await site.get("/healthz")).startswith(b"HTTP/1.1 200 ")
        assert await ended(oldest.read())
        assert (await other.read()).startswith(b"HTTP/1.1 408 ")
        a.close()
        b.close()

    async def test_close_does_not_wait_for_slow_clients(self, site: Site) -> None:
        asking = asyncio.create_task(site.get("/hangs"))
        await asyncio.sleep(0.05)
        async with asyncio.timeout(1):
            await site.server.close()
        assert await ended(asking)

    async def test_a_taken_port_is_an_error(self, site: Site) -> None:
        with pytest.raises(OSError, match="address already in use"):
            await HttpServer({}).start("127.0.0.1", site.port)


PROBES = """
import asyncio, logging, pytest
log = logging.getLogger("x")
async def fail(): raise ValueError
async def forget(): asyncio.ensure_future(fail()); await asyncio.sleep(0.01)

def test_pass_warning(): log.warning("boom")
@pytest.mark.allow_errors("bo+m")
def test_pass_allowed(): log.error("boom")
@pytest.mark.allow_errors
def test_pass_all_allowed(): log.error("boom")
def test_fail(): log.error("boom")
@pytest.mark.allow_errors("other")
def test_fail_other(): log.error("boom")
def test_fail_forgotten(): asyncio.run(forget())
@pytest.fixture
def late():
    yield
    log.critical("boom")
def test_fail_in_tear_down(late): pass
"""


def test_an_error_in_the_log_fails_a_test(tmp_path: Path) -> None:
    """The hook in conftest.py, tried on tests of its own."""
    (tmp_path / "conftest.py").write_text((Path(__file__).parents[1] / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = allow_errors\n")
    (tmp_path / "test_it.py").write_text(PROBES)
    command = [sys.executable, "-m", "pytest", "-rE", "-p", "no:cacheprovider", "-p", "no:asyncio", str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path).stdout
    failed = set(re.findall(r"^ERROR \S+::(\w+)", out, re.MULTILINE))
    assert failed == {name for name in re.findall(r"def (test_\w+)", PROBES) if name.startswith("test_fail")}
    assert "7 passed, 4 errors" in out


def test_a_flood_of_one_line_is_cut_short_and_counted() -> None:
    throttle, passed = obs_logging.Throttle(), list[str]()

    def say(line: int, created: float) -> None:
        record = logging.LogRecord("kvstore.x", logging.WARNING, "x.py", line, "no room for %s", ("f",), None)
        record.created = created
        if throttle.filter(record):
            passed.append(record.getMessage())

    for i in range(1000):
        say(1, 100 + i / 1000)
    say(2, 101)
    assert passed == ["no room for f"] * (obs_logging.BURST + 1), "another place has a count of its own"
    say(1, 100 + obs_logging.WINDOW_S)
    assert passed[-1] == f"no room for f (and {1000 - obs_logging.BURST} like it before, not shown)"
    say(1, 50.0)  # the clock was set back
    assert passed[-1] == "no room for f"
