"""``make bench``: every measurement, one after the other. Each is a module of its own: ``python -m bench.sdk`` …"""

from __future__ import annotations

import subprocess
import sys

from bench import trace
from bench.store import PYTHON


def run(title: str, *command: str) -> None:
    print(f"\n== {title}", flush=True)
    subprocess.run([PYTHON, "-m", *command], check=True)


def main() -> None:
    run("SDK beside the plain file", "bench.sdk")
    run("mount beside a plain directory", "bench.mount")
    run("master: 1,000,000 entries", "bench.master_scale")
    run("tiers under LMCache's load", "bench.tiers")
    if trace.DEFAULT_DATA.is_dir():
        run("cache policies on real traces", "bench.trace")
    else:
        print("\n== cache policies on real traces: left out; python -m bench.trace --data DIR names the traces")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
