"""The main job from end to end: two LMCache engines on two nodes share the KV of a prompt through two mounts.

``make demo`` runs it. Without root, /dev/fuse, pyfuse3 or LMCache it says what is missing, and moves the same chunks
between two processes through the SDK. Exit code 0 only when every chunk hit and every byte was equal.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.store import PYTHON, running

HERE = Path(__file__).resolve().parent
ACCEPTANCE = HERE.parent.parent / "shared" / "acceptance" / "lmcache_e2e.py"
PHASE_TIMEOUT_S = 300
console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class Phase(NamedTuple):
    """One process that stored or loaded."""

    title: str
    result: dict[str, Any]


def missing() -> list[str]:
    """What the whole demo needs and this machine lacks, each with what to do."""
    needs = [
        (os.geteuid() == 0, "root (mounting, passing open files): run it as root"),
        (
            os.access("/dev/fuse", os.R_OK | os.W_OK),
            "/dev/fuse: load the fuse module, or give the container the device",
        ),
        (shutil.which("fusermount3") is not None, "fusermount3: apt-get install fuse3"),
        (importlib.util.find_spec("pyfuse3") is not None, "pyfuse3: pip install 'kvstore[fuse]'"),
        (importlib.util.find_spec("lmcache") is not None, "lmcache: pip install 'kvstore[lmcache]'"),
        (importlib.util.find_spec("torch") is not None, "torch: pip install torch==2.13.0"),
    ]
    return [text for there, text in needs if not there]


def run_phase(title: str, command: list[str]) -> Phase:
    """Run one process to its end and take the JSON of its last line."""
    with console.status(title):
        done = subprocess.run(
            [PYTHON, *command],
            capture_output=True,
            text=True,
            timeout=PHASE_TIMEOUT_S,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{title}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    result = json.loads(lines[-1])
    console.print(f"  {'[green]ok[/]' if result['ok'] else '[red]FAILED[/]'}  {title}: {result['MBps']:,.0f} MB/s")
    return Phase(title, result)


def through_mounts(home: Path, chunks: int) -> list[Phase]:
    mounts = [home / "node-1", home / "node-2"]
    engine, phases = str(HERE / "lmcache_engine.py"), []
    with starting(home, mounts):
        for role, mount, title in (
            ("produce", mounts[0], "engine 1 stores the prompt through node 1's mount"),
            ("consume", mounts[1], "engine 2 loads it through node 2's mount, fetched from node 1"),
            ("consume", mounts[1], "engine 3 loads it through node 2's mount, now local"),
        ):
            url = f"fs://localhost:0{mount}/lmcache"
            phases.append(run_phase(title, [engine, role, "--url", url, "--chunks", str(chunks)]))
        if ACCEPTANCE.is_file():
            acceptance(mounts, chunks)
    return phases


def through_sdk(home: Path, chunks: int) -> list[Phase]:
    script, phases = str(HERE / "sdk_chunks.py"), []
    with starting(home, []) as facts:
        sockets = facts["worker_sockets"]
        for role, socket, title in (
            ("produce", sockets[0], "process 1 stores the chunks on node 1"),
            ("consume", sockets[1], "process 2 loads them on node 2, fetched from node 1"),
            ("consume", sockets[1], "process 3 loads them on node 2, now local"),
        ):
            command = [script, role, "--url", facts["url"], "--socket", socket, "--chunks", str(chunks)]
            phases.append(run_phase(title, command))
    return phases


@contextmanager
def starting(home: Path, mounts: list[Path]) -> Iterator[dict[str, Any]]:
    """A store, with a line that says so while it takes long."""
    mounted = "two mounts" if mounts else "no mount"
    with running(home, mounts, capacity="4GiB") as facts:
        console.print(f"  [green]ok[/]  a store with two nodes and {mounted}: {facts['url']}")
        yield facts


def acceptance(mounts: list[Path], chunks: int) -> None:
    """The acceptance script beside the checkout, where it is there: producer on one mount, consumer on the other."""
    for role, mount in zip(("producer", "consumer"), mounts, strict=True):
        command = [PYTHON, str(ACCEPTANCE), "--role", role, "--dir", f"{mount}/acceptance"]
        with console.status(f"acceptance script, {role}"):
            done = subprocess.run(
                [*command, "--chunks", str(chunks)],
                capture_output=True,
                text=True,
                timeout=PHASE_TIMEOUT_S,
                env={**os.environ, "PYTHONHASHSEED": "0"},
                check=False,
            )
        if done.returncode != 0:
            raise SystemExit(
                f"acceptance script, {role}: exit code {done.returncode}\n{done.stdout}{done.stderr[-4000:]}"
            )
        console.print(f"  [green]ok[/]  acceptance script, {role} on {mount.name}")


def summary(phases: list[Phase]) -> Table:
    table = Table(box=None, header_style="bold")
    for title, justify in (("phase", "left"), ("chunks hit", "right"), ("bytes equal", "right"), ("MB/s", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for title, result in phases:
        table.add_row(title, hits(result), compared(result), f"{result['MBps']:,.0f}")
    return table


def hits(result: dict[str, Any]) -> str:
    if result["role"] == "produce":
        return f"{result['chunks']} stored"
    hit = result.get("hit_chunks", result.get("hit_tokens", 0) // 256)
    return f"{hit} of {result['chunks']}"


def compared(result: dict[str, Any]) -> str:
    if result["role"] == "produce":
        return ""
    return f"{result['bytes_equal']:,} of {result['bytes_compared']:,}"


KEEP = """
To keep a store running:  [bold].venv/bin/kvstore up --mount /mnt/kv --data /var/lib/kvstore[/]
                          (Ctrl-C stops it)
Then start LMCache with:  [bold]LMCACHE_REMOTE_URL=fs://localhost:0/mnt/kv/lmcache PYTHONHASHSEED=0[/]
Look at it:               [bold].venv/bin/kvstore report[/], [bold].venv/bin/kvstore fs ls /[/]"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=16, help="of 256 tokens, 14 MiB each")
    args = parser.parse_args()
    lacks, started = missing(), time.monotonic()
    console.print("[bold]kvstore demo[/]: two nodes, one prompt of Qwen2-7B's KV shape\n")
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as directory:
        phases = (through_sdk if lacks else through_mounts)(Path(directory), args.chunks)
    console.print()
    console.print(summary(phases))
    if lacks:
        console.print("\n[bold yellow]Left out: the mounts and the LMCache engines.[/] This machine lacks:")
        for text in lacks:
            console.print(f"  - {text}")
    console.print(KEEP, soft_wrap=True)
    ok = all(phase.result["ok"] for phase in phases)
    console.print(f"\n{'[bold green]all chunks hit, all bytes equal' if ok else '[bold red]FAILED'}[/] "
                  f"({time.monotonic() - started:.0f} s)")  # fmt: skip
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        console.print("\ninterrupted; the store was stopped and its files removed")
        sys.exit(130)
