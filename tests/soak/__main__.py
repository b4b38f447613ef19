"""`make soak`: run the soak, print the result and the command that repeats it.

python -m tests.soak [--seconds 3600] [--seed N] [--kinds segment,ring | all] [--every] [--folder DIRECTORY]
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.soak.corruption import KINDS, chosen_kinds
from tests.soak.soak import Soak


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Run a broker under load and faults.")
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long, about (default: one hour)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="default: random")
    parser.add_argument("--kinds", default="", help=f"files to damage: all, or some of {','.join(KINDS)}")
    parser.add_argument("--every", action="store_true", help="damage a copy in each round, kinds and actions in turn")
    parser.add_argument("--folder", type=Path, help="where to work; kept (default: a temporary directory)")
    given = parser.parse_args()
    # Like Ctrl-C, so that the broker ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"soak: seed {given.seed}, {given.seconds:.0f} s", flush=True)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="basalt-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    soak = Soak(folder, given.seconds, given.seed, chosen_kinds(given.kinds), every=given.every, say=_say)
    problems = soak.run()
    if problems:
        kinds = (f" --kinds {given.kinds}" if given.kinds else "") + (" --every" if given.every else "")
        print(f"data is in {folder}; repeat with: python -m tests.soak --seed {given.seed} "
              f"--seconds {given.seconds:.0f}{kinds}")  # fmt: skip
        return 1
    if given.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
