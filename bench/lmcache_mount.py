"""LMCache's own put and get through the mount, beside a plain directory on the same disk.

    python -m bench.lmcache_mount [--rounds 3] [--chunks 16] [--model qwen2-7b]

Real engines in processes of their own (`lmcache_engine.py`), both places in turn, a fresh prompt each round. put =
store() until the last put ended; get = the connector alone, first time and again; retrieve = again, into the paged
cache. Medians in MB/s. `bench.mount` does the same for each mode of the mount.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.store import PYTHON, running

ENGINE: Final = Path(__file__).with_name("lmcache_engine.py")
TIMEOUT_S: Final = 300
CHUNKS: Final = 16
MODEL: Final = "qwen2-7b"


def engine(role: str, directory: Path, seed: int, model: str, chunks: int) -> dict[str, Any]:
    command = [PYTHON, str(ENGINE), role, "--url", f"fs://localhost:0{directory}", "--seed", str(seed)]
    command += ["--chunks", str(chunks), "--model", model]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise SystemExit(f"{role} on {directory}: exit code {done.returncode}\n{done.stdout}{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def one_round(directory: Path, seed: int, model: str = MODEL, chunks: int = CHUNKS) -> dict[str, float]:
    """MB/s of each kind; the seed makes the prompt."""
    produced = engine("produce", directory, seed, model, chunks)
    got = engine("get", directory, seed, model, chunks)
    consumed = engine("consume", directory, seed, model, chunks)
    return {
        "put": produced["MBps"],
        "get": got["MBps"],
        "get again": got["again_MBps"],
        "retrieve": consumed["MBps"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=CHUNKS)
    parser.add_argument("--model", default=MODEL)
    options = parser.parse_args()
    plain, mount = [], []
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name:
        home = Path(name)
        with running(home, [home / "mount"], capacity="8GiB", nodes=1):
            for seed in range(1, options.rounds + 1):
                plain.append(one_round(home / "plain", seed, options.model, options.chunks))
                mount.append(one_round(home / "mount" / "kv", seed, options.model, options.chunks))
    print(f"LMCache, {options.model}, {options.chunks} chunks, median of {options.rounds}, MB/s")
    print(f"{'':10} {'plain':>8} {'mount':>8} {'ratio':>7}")
    for what in plain[0]:
        a, b = (statistics.median(r[what] for r in rounds) for rounds in (plain, mount))
        print(f"{what:10} {a:8.0f} {b:8.0f} {b / a:7.2f}")


if __name__ == "__main__":
    main()
