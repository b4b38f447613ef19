"""A program that uses a store and is killed with SIGKILL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LINES_MAX = 5_000
KILL_WAIT_S = 30.0


def lines_until_killed(program: str, store: Path, count: int) -> list[str]:
    """Run `program` with the store as its argument. Kill it after `count` lines; return all lines that it printed.

    The program prints a line when an operation is confirmed, and must not end by itself.
    """
    with subprocess.Popen(
        [sys.executable, "-c", program, str(store)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        try:
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if len(lines) >= count:
                    break
        finally:
            process.kill()
        # Lines printed before the kill are still in the pipe.
        lines += [line.rstrip("\n") for line in process.stdout if line.endswith("\n")]
        process.wait(KILL_WAIT_S)
    assert len(lines) >= count, "the program ended by itself"
    return lines
