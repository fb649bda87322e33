"""``python -m tests.chaos --minutes N [--seed S]``: real processes, real faults, every byte compared.

Ends with 0 when there were no wrong bytes, no hangs, no lost acknowledgements, and puts worked that should have worked;
1 otherwise, 2 where it cannot run.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos.net import NoNetwork
from tests.chaos.report import report
from tests.chaos.run import run
from tests.support.mounts import can_mount


def main() -> int:
    options = _options()
    if not can_mount():
        print("chaos: mounting needs root and /dev/fuse", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    print(
        f"chaos: {options.minutes:g} min of faults, seed {options.seed}; "
        f"the same ones in the same order: make chaos MINUTES={options.minutes:g} SEED={options.seed}",
        flush=True,
    )
    root = Path(tempfile.mkdtemp(prefix="kvstore-chaos-"))
    is_good = False
    try:
        outcome = run(root, options.minutes * 60, options.seed, lambda line: print(line, flush=True))
        print(report(outcome), flush=True)
        is_good = outcome.is_good
    except NoNetwork as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 2
    finally:
        if is_good:
            shutil.rmtree(root)
        else:
            print(f"chaos: logs and records are kept in {root}", file=sys.stderr)
    return 0 if is_good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="of faults; start, warm-up and judgement come on top"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="which faults, in which order")
    return parser.parse_args()


def _interrupt(number: int, _: object) -> None:
    """Once: what is cleaned up after it is not interrupted again."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    sys.exit(main())
