"""A short run of the AMQP fuzzer; BASALT_FUZZ_SECONDS makes it longer."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from pathlib import Path

from tests.fuzz import amqp091_served as served
from tests.fuzz.amqp091 import fuzz

ROUNDS = 150
SECONDS = float(os.environ.get("BASALT_FUZZ_SECONDS", "0"))


def test_damaged_sessions_cause_no_internal_error() -> None:
    seed = random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {seed} on")
    until = time.monotonic() + SECONDS

    def stop(count: int) -> bool:
        return count >= ROUNDS and time.monotonic() > until

    assert asyncio.run(fuzz(itertools.count(seed), stop)) >= ROUNDS


def test_damaged_sessions_over_sockets_leave_nothing_behind(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {seed} on")
    count, _ = served.fuzz(tmp_path, seconds=max(SECONDS, 3.0), seed=seed)
    assert count
