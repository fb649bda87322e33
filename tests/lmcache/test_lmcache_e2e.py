"""The main job: real LMCache engines in processes of their own share KV chunks through two mounts, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, clean_environment
from tests.support.mounts import Mount, can_mount, mounted

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "bench" / "lmcache_engine.py"
ACCEPTANCE = ROOT.parent / "shared" / "acceptance" / "lmcache_e2e.py"
TIMEOUT_S = 200
CHUNK_BYTES = 14_680_064
"""Qwen2-7B, 256 tokens, bf16."""

pytestmark = [
    pytest.mark.lmcache,
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.skipif(not can_mount(), reason="mounting needs root and /dev/fuse"),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, workers=2, capacity="1GiB") as running:
        yield running


@pytest.fixture
def mounts(cluster: Cluster, tmp_path: Path) -> Iterator[list[Mount]]:
    one, two = cluster.workers
    with mounted(cluster, tmp_path / "a", one) as first, mounted(cluster, tmp_path / "b", two) as second:
        yield [first, second]


def python(script: Path, *arguments: str) -> dict[str, Any]:
    """Run a script to its end; the JSON of its last line. Fails with its output unless the exit code is 0."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=clean_environment() | {"PYTHONHASHSEED": "0"},
        check=False,
    )
    output = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, f"{script.name} {' '.join(arguments)}: exit code {done.returncode}\n{output}"
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith(("{", "RESULT {"))]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def engine(role: str, mount: Mount, *, chunks: int = 16, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    url = f"fs://localhost:0{mount.path}/kv"
    return python(ENGINE, role, "--url", url, "--chunks", str(chunks), "--extra", json.dumps(extra or {}))


def check_consumed(result: dict[str, Any], chunks: int) -> None:
    assert result["chunk_bytes"] == CHUNK_BYTES
    assert result["hit_tokens"] == result["retrieved_tokens"] == chunks * 256
    assert result["bytes_equal"] == result["bytes_compared"] == chunks * CHUNK_BYTES
    assert result["unknown_prompt_hits"] == 0


def test_two_engines_share_a_prompt_through_two_mounts(mounts: list[Mount]) -> None:
    produced = engine("produce", mounts[0])
    assert (produced["stored_tokens"], produced["put_failed"]) == (16 * 256, 0)
    consumed = engine("consume", mounts[1])
    check_consumed(consumed, 16)
    assert engine("get", mounts[1])["ok"] is True
    assert consumed["pid"] != produced["pid"]
    names = sorted(os.listdir(mounts[1].path / "kv"))
    assert len(names) == 16
    assert all(name.endswith(".data") for name in names)
    assert sorted(os.listdir(mounts[0].path / "kv")) == names  # no temporary file is left


def test_without_a_header_and_without_buffering(mounts: list[Mount]) -> None:
    """`save_chunk_meta` off, O_DIRECT on: the connector's other way to read and write."""
    extra = {"save_chunk_meta": False, "fs_connector_use_odirect": True}
    (mounts[0].path / "kv").mkdir()  # with O_DIRECT the connector asks for its block size before it makes it
    engine("produce", mounts[0], chunks=4, extra=extra)
    check_consumed(engine("consume", mounts[1], chunks=4, extra=extra), 4)
    assert engine("get", mounts[1], chunks=4, extra=extra)["ok"] is True
    assert {p.stat().st_size for p in (mounts[1].path / "kv").iterdir()} == {CHUNK_BYTES}


def test_what_was_stored_survives_the_death_of_every_process(cluster: Cluster, mounts: list[Mount]) -> None:
    engine("produce", mounts[0], chunks=4)
    for process in (cluster.master, *cluster.workers):
        process.kill()
    for process in (cluster.master, *cluster.workers):
        process.start()
    cluster.wait_live("node-0", "node-1")
    check_consumed(engine("consume", mounts[1], chunks=4), 4)


if ACCEPTANCE.exists():

    def test_the_acceptance_script_on_one_mount(mounts: list[Mount]) -> None:
        assert python(ACCEPTANCE, "--dir", f"{mounts[0].path}/kv")["ok"] is True

    def test_the_acceptance_script_on_two_mounts(mounts: list[Mount]) -> None:
        python(ACCEPTANCE, "--role", "producer", "--dir", f"{mounts[0].path}/kv")
        assert python(ACCEPTANCE, "--role", "consumer", "--dir", f"{mounts[1].path}/kv")["ok"] is True
