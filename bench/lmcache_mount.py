"""LMCache's own put and get through the mount, beside a plain directory on the same disk.

    python -m bench.lmcache_mount [--rounds 3] [--chunks 16] [--model qwen2-7b]

Real engines in processes of their own (`lmcache_engine.py`), both places in turn, a fresh prompt each round. put =
store() until the last put ended; retrieve = into the paged cache; get = the connector alone. Medians in MB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from bench.store import PYTHON, running

ENGINE = Path(__file__).with_name("lmcache_engine.py")
TIMEOUT_S = 300


def engine(role: str, directory: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    command = [PYTHON, str(ENGINE), role, "--url", f"fs://localhost:0{directory}", "--seed", str(seed)]
    command += ["--chunks", str(options.chunks), "--model", options.model]
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


def one_round(directory: Path, seed: int, options: argparse.Namespace) -> dict[str, float]:
    produced = engine("produce", directory, seed, options)
    consumed = engine("consume", directory, seed, options)
    return {"put": produced["MBps"], "retrieve": consumed["MBps"], "get": consumed["get_MBps"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--model", default="qwen2-7b")
    options = parser.parse_args()
    plain, mount = [], []
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name:
        home = Path(name)
        with running(home, [home / "mount"], capacity="8GiB", nodes=1):
            for seed in range(1, options.rounds + 1):
                plain.append(one_round(home / "plain", seed, options))
                mount.append(one_round(home / "mount" / "kv", seed, options))
    print(f"LMCache, {options.model}, {options.chunks} chunks, median of {options.rounds}, MB/s")
    print(f"{'':10} {'plain':>8} {'mount':>8} {'ratio':>7}")
    for what in plain[0]:
        a, b = (statistics.median(r[what] for r in rounds) for rounds in (plain, mount))
        print(f"{what:10} {a:8.0f} {b:8.0f} {b / a:7.2f}")


if __name__ == "__main__":
    main()
