"""A short run of the gRPC fuzzer; BASALT_FUZZ_SECONDS makes it longer."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time

from tests.fuzz.grpc import fuzz

ROUNDS = 40
SECONDS = float(os.environ.get("BASALT_FUZZ_SECONDS", "0"))


def test_damaged_sessions_cause_no_internal_error() -> None:
    seed = random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {seed} on")
    until = time.monotonic() + SECONDS

    def stop(count: int) -> bool:
        return count >= ROUNDS and time.monotonic() > until

    assert asyncio.run(fuzz(itertools.count(seed), stop)) >= ROUNDS
