"""``kvstore fs``, ``report`` and ``nodes`` against a real store: what they print, and their exit codes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore import Client
from tests.support.cluster import Cluster, clean_environment, wait_until
from tests.support.mounts import can_mount

MIB = 1 << 20


class Done(NamedTuple):
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


class Cli:
    """Runs the command in a process of its own, as a person would."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self, *args: str, stdin: bytes = b"", code: int = 0) -> Done:
        command = [sys.executable, "-m", "kvstore.cli.main", *args, "--master", self._url]
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=False)
        result = Done(done.returncode, done.stdout, done.stderr.decode())
        assert result.code == code, result
        assert "Traceback" not in result.err
        return result

    def fails(self, code: int, *args: str) -> str:
        """One clear line on standard error, nothing on standard output."""
        done = self(*args, code=code)
        assert done.out == b""
        (line,) = done.err.splitlines()
        assert line.startswith("kvstore: ")
        return line


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), workers=2) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Client]:
    """Its root is the test's directory."""
    with Client(f"{cluster.url}/{request.node.name}", worker_socket="", metadata_ttl_s=0) as client:
        client.mkdir("", parents=True)
        yield client


@pytest.fixture
def cli(cluster: Cluster, request: pytest.FixtureRequest) -> Cli:
    return Cli(f"{cluster.url}/{request.node.name}")


def test_put_and_get(cli: Cli, client: Client, tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(os.urandom(MIB + 1))
    (stored,) = cli("fs", "put", str(source), "d/v", "--json").rows
    assert (stored["path"], stored["size_bytes"]) == ("/d/v", MIB + 1)
    assert client.get("d/v") == source.read_bytes()
    (copied,) = cli("fs", "get", "d/v", str(target), "--json").rows
    assert copied["path"] == str(target)
    assert target.read_bytes() == source.read_bytes()


def test_put_into_a_directory_takes_the_name(cli: Cli, client: Client, tmp_path: Path) -> None:
    (tmp_path / "name").write_bytes(b"1")
    client.mkdir("there")
    cli("fs", "put", str(tmp_path / "name"), "there")
    cli("fs", "put", str(tmp_path / "name"), "new/")
    assert client.get("there/name") == client.get("new/name") == b"1"
    (tmp_path / "target").mkdir()
    cli("fs", "get", "there/name", str(tmp_path / "target"))
    assert (tmp_path / "target" / "name").read_bytes() == b"1"


def test_put_from_standard_input_and_if_absent(cli: Cli, client: Client) -> None:
    cli("fs", "put", "-", "v", stdin=b"first")
    assert "kept" in cli("fs", "put", "-", "v", "--if-absent", stdin=b"second").text
    assert client.get("v") == b"first"


def test_cat(cli: Cli, client: Client) -> None:
    data = os.urandom(3 * MIB)
    client.put("v", data)
    assert cli("fs", "cat", "v").out == data
    assert cli("fs", "get", "v", "-").out == data
    assert not Path("-").exists()
    (row,) = cli("fs", "cat", "v", "--json").rows
    assert base64.b64decode(row["base64"]) == data


def test_ls(cli: Cli, client: Client) -> None:
    client.put("d/file", b"12345")
    client.mkdir("d/sub")
    assert [(r["name"], r["type"], r["size_bytes"]) for r in cli("fs", "ls", "d", "--json").rows] == [
        ("file", "file", 5),
        ("sub", "directory", 0),
    ]
    table = cli("fs", "ls", "-l", "d").text
    assert "-rw-r--r--" in table
    assert "drwxr-xr-x" in table
    assert "(ssd)" in table, "where the replicas are"
    assert [r["name"] for r in cli("fs", "ls", "d/file", "--json").rows] == ["/d/file"]


def test_a_name_that_would_play_with_the_terminal_is_shown_not_obeyed(cli: Cli, client: Client) -> None:
    client.put("evil\x1b[2J\nname", b"1")
    out = cli("fs", "ls").out
    assert b"\x1b" not in out
    assert b"\\x1b" in out


def test_stat(cli: Cli, client: Client) -> None:
    client.put("v", b"12345")
    (row,) = cli("fs", "stat", "v", "--json").rows
    entry = client.stat("v")
    assert (row["inode"], row["block"], row["size_bytes"]) == (entry.inode, str(entry.address), 5)
    assert [r["node"] for r in row["replicas"]] == [r.node for r in entry.replicas]
    assert str(entry.address) in cli("fs", "stat", "v").text
    assert [cli("fs", "stat", root, "--json").rows[0]["name"] for root in ("", "/", "//")] == ["/"] * 3


def test_mkdir(cli: Cli, client: Client) -> None:
    assert "does not exist" in cli.fails(3, "fs", "mkdir", "a/b")
    cli("fs", "mkdir", "-p", "a/b")
    cli("fs", "mkdir", "-p", "a/b")
    assert client.stat("a/b").is_dir
    cli.fails(4, "fs", "mkdir", "a/b")


def test_rm(cli: Cli, client: Client) -> None:
    client.put_many({"d/a": b"1", "d/e/b": b"2", "d/e/f/c": b"3", "keep": b"4"})
    assert cli.fails(8, "fs", "rm", "d") == "kvstore: /d: is not empty; -r removes it with all below it"
    removed = [row["removed"] for row in cli("fs", "rm", "-r", "d", "--json").rows]
    assert removed == ["/d/a", "/d/e/b", "/d/e/f/c", "/d/e/f", "/d/e", "/d"]
    assert [name for name, _ in client.list("")] == ["keep"]
    assert cli.fails(3, "fs", "rm", "d//e/") == "kvstore: /d/e: does not exist"
    cli("fs", "rm", "-f", "d")
    cli.fails(2, "fs", "rm", "-r", "/")
    assert client.exists("keep")


def test_mv(cli: Cli, client: Client) -> None:
    client.put_many({"a": b"1", "b": b"2"})
    client.mkdir("d")
    assert cli.fails(4, "fs", "mv", "-n", "a", "b") == "kvstore: /b: exists already"
    assert cli.fails(8, "fs", "mv", "d", "a") == "kvstore: /a: is a file, and a directory cannot replace it"
    assert cli.fails(3, "fs", "mv", "a", "no/a") == "kvstore: /no/a: a directory above it does not exist"
    cli("fs", "mv", "a", "b")
    assert client.get("b") == b"1"
    assert cli("fs", "mv", "b", "d", "--json").rows == [{"from": "/b", "to": "/d/b"}]
    assert client.get("d/b") == b"1"
    assert cli.fails(3, "fs", "mv", "a", "c") == "kvstore: /a: does not exist"


def test_du(cli: Cli, client: Client) -> None:
    client.put_many({"a": b"1" * 10, "d/b": b"2" * 20, "d/e/c": b"3" * 30})
    (whole,) = cli("fs", "du", "--json").rows
    assert whole == {"path": "/", "size_bytes": 60, "files": 3, "directories": 2, "quota_bytes": 0}
    rows = cli("fs", "du", "-d", "2", "--json").rows
    assert [(r["path"], r["size_bytes"], r["files"]) for r in rows] == [("/d/e", 30, 1), ("/d", 50, 2), ("/", 60, 3)]
    assert [r["size_bytes"] for r in cli("fs", "du", "a", "--json").rows] == [10]


def test_df(cli: Cli, client: Client) -> None:
    (row,) = cli("fs", "df", "--json").rows
    assert row["capacity_bytes"] == 2 * 256 * MIB
    assert "512 MiB" in cli("fs", "df").text


def test_every_command_counts_directories_alike(cluster: Cluster, client: Client) -> None:
    """Those below the root, not the root itself."""
    client.mkdir("a/b", parents=True)
    cli = Cli(cluster.url)
    counts = {cli(*args, "--json").rows[0]["directories"] for args in (("fs", "du"), ("fs", "df"), ("report",))}
    assert len(counts) == 1


def test_nodes_list(cli: Cli, cluster: Cluster, client: Client) -> None:
    rows = cli("nodes", "list", "--json").rows
    assert {(r["node"], r["state"], r["endpoint"]) for r in rows} == {
        (w.node, "live", w.facts["ENDPOINT"]) for w in cluster.workers
    }
    assert all(r["volumes"][0]["tier"] == "ssd" for r in rows)
    assert all({"hits", "fetches", "misses"} <= r.keys() for r in rows)
    text = cli("nodes", "list").text
    assert all(w.node in text for w in cluster.workers)
    assert "since the start of each worker" in text


@pytest.mark.parametrize("args", [("nodes", "list"), ("report",), ("fs", "ls", "-l"), ("fs", "stat", "v" * 200)])
def test_a_narrow_terminal_cuts_nothing(cluster: Cluster, client: Client, cli: Cli, args: tuple[str, ...]) -> None:
    name = "v" * 200
    client.put(name, b"1")
    root = client.target.root
    said = on_terminal([*args, "--master", f"{cluster.url}/{root}"], columns=80)
    assert "…" not in said
    wanted = [w.facts["ENDPOINT"] for w in cluster.workers] if args == ("nodes", "list") else [cluster.workers[0].node]
    assert all(text in said for text in (wanted if args[0] != "fs" else [name]))


def on_terminal(args: list[str], columns: int, *, press: bytes = b"", kill: int = 0, once: str = "") -> str:
    """What a command writes to a terminal of this width; when it wrote `once`, keys are pressed or a signal is sent."""
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    before = termios.tcgetattr(its)
    environ = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "kvstore.cli.main", *args]
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environ) as process:
        said, end = b"", time.monotonic() + 60
        try:
            while process.poll() is None and time.monotonic() < end:
                said += read_for(ours, 0.1)
                if once and once.encode() in said:
                    once = ""
                    os.write(ours, press)
                    if kill:
                        process.send_signal(kill)
        finally:
            process.kill()  # of one that has ended nothing comes
    said += read_for(ours, 0.0)
    assert process.returncode == 0, said
    assert termios.tcgetattr(its) == before
    os.close(its)
    os.close(ours)
    return said.decode()


def read_for(fd: int, seconds: float) -> bytes:
    """All that comes within so long a silence."""
    data = b""
    while select.select([fd], [], [], seconds)[0]:
        data += os.read(fd, 65536)
    return data


def test_report(cli: Cli, client: Client, cluster: Cluster) -> None:
    client.put("v", b"1")
    client.get("v")
    wait_until(lambda: sum(n.counters.hits for n in cluster.map().nodes) > 0, "counters came with a heartbeat")
    (row,) = cli("report", "--json").rows
    assert (row["live_nodes"], row["capacity_bytes"]) == (2, 2 * 256 * MIB)
    assert 0 < row["hit_ratio"] <= 1
    assert [r["node"] for r in row["reads"]] == [w.node for w in cluster.workers]
    assert sum(r["hits"] for r in row["reads"]) == row["hits"] > 0
    text = cli("report").text
    assert "2 live of 2" in text
    assert "since the start of each worker" in text


def test_report_by_tier(cli: Cli, client: Client, cluster: Cluster) -> None:
    client.put("v", os.urandom(MIB))
    client.get("v")
    client.remove("v")
    wait_until(lambda: "removed" in cli("report").text, "the unlink came with a heartbeat")
    (row,) = cli("report", "--json").rows
    assert [(t["node"], t["tier"], t["capacity_bytes"]) for t in row["tiers"]] == [
        (w.node, "ssd", 256 * MIB) for w in cluster.workers
    ]
    assert sum(t["hits"] for t in row["tiers"]) == row["hits"] > 0
    assert sum(t["unlinked"].get("removed", {"bytes": 0})["bytes"] for t in row["tiers"]) >= MIB
    assert max(map(len, cli("report").text.splitlines())) <= 100


def test_top_prints_lines_where_there_is_no_terminal(cli: Cli, client: Client, cluster: Cluster) -> None:
    client.put("v", b"1")
    done = cli("top", "--count", "2", "--interval", "0.5")
    assert b"\x1b" not in done.out
    first, second = re.split(r"\n(?=\d\d:\d\d:\d\d )", done.text)
    assert ("look-ups" in first, "look-ups" in second) == (False, True)
    assert all(f"{w.node}  ssd" in second for w in cluster.workers)


def test_top_draws_on_a_terminal_until_q(cluster: Cluster) -> None:
    args = ["top", "--interval", "0.2", "--master", cluster.url]
    said = on_terminal(args, columns=60, press=b"xq", once="look-ups")
    lines = said.split("\x1b[?25h")[0].splitlines()
    assert all(w.node in said for w in cluster.workers)
    assert max(len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) for line in lines) <= 60, "cut, as a screen has no more"
    assert said.rstrip().endswith("\x1b[?25h"), "the cursor is there again"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_top_leaves_the_terminal_as_it_was(cluster: Cluster, number: int) -> None:
    said = on_terminal(["top", "--master", cluster.url], columns=80, kill=number, once="TIER")
    assert said.rstrip().endswith("\x1b[?25h")
    assert "Traceback" not in said


def test_a_cold_cache_shows_in_the_hit_ratio(cli: Cli, client: Client) -> None:
    """Keys that nobody stored (another PYTHONHASHSEED) never get to a worker: its counters stay at 100 %."""
    client.put("v", b"1")
    before = cli("report", "--json").rows[0]
    assert client.get_many([f"never-{i}" for i in range(500)]) == [None] * 500
    (after,) = cli("report", "--json").rows
    assert after["lookups"]["not_found"] - before["lookups"]["not_found"] == 500
    assert after["hit_ratio"] < before["hit_ratio"]
    found, not_found = after["lookups"]["found"], after["lookups"]["not_found"]
    assert after["hit_ratio"] == found / (found + not_found)
    assert f"{found:,} found, {not_found:,} not found ({100 * after['hit_ratio']:.1f} %)" in cli("report").text


@pytest.mark.parametrize(
    ("code", "args"),
    [
        (3, ("fs", "cat", "none")),
        (3, ("fs", "get", "none", "x")),
        (3, ("fs", "ls", "none")),
        (3, ("fs", "stat", "none")),
        (3, ("fs", "put", "/none/such/file", "v")),
        (2, ("fs", "stat", "../up")),
        (8, ("fs", "cat", "/")),
        (2, ("fs", "du", "-d", "-1")),
        (2, ("fs", "nonsense")),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_stable_code(
    cli: Cli, client: Client, tmp_path: Path, code: int, args: tuple[str, ...]
) -> None:
    done = cli(*args, code=code)
    assert done.out == b""
    assert "kvstore: " in done.err


def test_a_configuration_of_a_worker_is_enough_to_find_the_store(cluster: Cluster) -> None:
    environ = clean_environment()
    environ |= {"KVSTORE_CONFIG": str(cluster.workers[0].config), "KVSTORE_CLIENT__TIMEOUT": "2s"}
    for args in (["report"], ["nodes", "list"], ["fs", "df"]):
        command = [sys.executable, "-m", "kvstore.cli.main", *args, "--json"]
        done = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True, env=environ)
        assert done.returncode == 0, done.stderr


def test_without_a_store_it_says_so() -> None:
    command = [sys.executable, "-m", "kvstore.cli.main", "fs", "df", "--master", "127.0.0.1:1"]
    environ = {**os.environ, "KVSTORE_CLIENT__TIMEOUT": "300ms"}
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True, env=environ)
    assert done.returncode == 5
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvstore: 127.0.0.1:1: connection refused; is it running?")
    assert line.endswith("(set --master or client.master)")


@pytest.mark.fuse
@pytest.mark.skipif(not can_mount(), reason="mounting needs root and /dev/fuse")
def test_a_mount_without_a_master_says_where_to_name_it(tmp_path: Path) -> None:
    environ = clean_environment() | {"KVSTORE_WORKER__MASTER": "127.0.0.1:1"}
    command = [sys.executable, "-m", "kvstore.cli.main", "mount", str(tmp_path / "m")]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True, env=environ)
    assert done.returncode == 5
    assert done.stderr.splitlines()[-1].startswith("kvstore: 127.0.0.1:1: connection refused")
    assert done.stderr.endswith("(set --master or mount.master)\n")


def test_a_reader_that_leaves_is_no_error(cli: Cli, client: Client, cluster: Cluster) -> None:
    client.put("v", os.urandom(4 * MIB))
    command = (
        f"{sys.executable} -m kvstore.cli.main fs cat test_a_reader_that_leaves_is_no_error/v --master {cluster.url}"
    )
    done = subprocess.run(["bash", "-c", f"{command} | head -c 1"], capture_output=True, timeout=60, check=False)
    assert done.stderr == b""
    assert len(done.stdout) == 1


def test_quota_ttl_and_pin(cli: Cli, client: Client) -> None:
    client.put("t/a/x", b"1" * MIB)
    (said,) = cli("fs", "quota", "/t", "10MiB", "--json").rows
    assert [(q["path"], q["quota_bytes"]) for q in said["quotas"]] == [("/t", 10 * MIB)]
    cli("fs", "ttl", "t/a", "36h")
    assert "a directory; -r" in cli.fails(2, "fs", "pin", "/t/a")
    cli("fs", "pin", "/t/a", "-r")
    cli("fs", "pin", "/t/a/x")
    wait_until(lambda: "still counting" not in cli("fs", "quota", "/t").text, "what lay there is counted")
    shown = cli("fs", "stat", "/t/a/x").text
    for words in ("1.00 MiB of 10.0 MiB below /t", "1 d 12 h", "PINNED", "yes", "/t/a"):
        assert words in shown, shown
    assert "1.00 MiB of 10.0 MiB" in cli("fs", "quota", "/t").text, "without a size it is shown"
    rows = {r["path"]: r for r in cli("fs", "policies", "--json").rows if not r["path"].startswith("store:")}
    assert {path: (row["quota_bytes"], row["ttl_s"], row["pinned"]) for path, row in rows.items()} == {
        "/t": (10 * MIB, 0, False),
        "/t/a": (0, 36 * 3600, True),
        "/t/a/x": (0, 0, True),
    }
    assert [(r["path"], r["quota_bytes"]) for r in cli("fs", "du", "-d", "1", "--json").rows] == [
        ("/t", 10 * MIB),
        ("/", 0),
    ]
    assert cli("fs", "df", "/t/a", "--json").rows[0]["capacity_bytes"] == 10 * MIB
    assert cli("fs", "df", "--json").rows[0]["capacity_bytes"] == 2 * 256 * MIB
    for command in (("quota", "/t", "none"), ("ttl", "/t/a", "none"), ("unpin", "/t/a"), ("unpin", "/t/a/x")):
        cli("fs", *command)
    assert all(row["path"].startswith("store:") for row in cli("fs", "policies", "--json").rows), "of other tests"


def test_what_makes_no_sense_as_a_policy_is_one_clear_line(cli: Cli, client: Client) -> None:
    client.put("f", b"1")
    client.mkdir("d")
    assert "of a file only the pin" in cli.fails(2, "fs", "quota", "/f", "1GiB")
    assert "write none to take it away" in cli.fails(2, "fs", "quota", "/d", "0")
    assert "write none to take it away" in cli.fails(2, "fs", "ttl", "/d", "0")
    assert "unit" in cli.fails(2, "fs", "ttl", "/d", "12")
    assert "/nowhere: does not exist" in cli.fails(3, "fs", "pin", "/nowhere")
    client.set_policy("d", quota_bytes=MIB)
    client.mkdir("e/f", parents=True)
    assert "copy it" in cli.fails(2, "fs", "mv", "/e/f", "/d")
    big = b"1" * (2 * MIB)
    assert "/d has a quota" in cli_fails_with_input(cli, big, 6, "fs", "put", "-", "/d/big")


def cli_fails_with_input(cli: Cli, stdin: bytes, code: int, *args: str) -> str:
    return cli(*args, stdin=stdin, code=code).err
