"""``make bench``: every measurement, one after the other. Each is a module of its own: ``python -m bench.sdk`` …"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from bench.store import PYTHON, running


def run(title: str, *command: str) -> None:
    print(f"\n== {title}", flush=True)
    subprocess.run([PYTHON, "-m", *command], check=True)


def main() -> None:
    run("SDK beside the plain file", "bench.sdk")
    run("LMCache through the mount beside a plain directory", "bench.lmcache_mount")
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name:
        home = Path(name)
        (home / "plain").mkdir()
        with running(home, [home / "mount"], capacity="8GiB", nodes=1):
            for threads in ("1", "4"):
                places = ["--mount", str(home / "mount"), "--plain", str(home / "plain")]
                run(
                    f"mount beside a plain directory, {threads} at a time", "bench.mount", *places, "--threads", threads
                )
    run("master: 1,000,000 entries", "bench.master_scale")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
