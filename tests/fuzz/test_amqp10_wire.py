"""A short run of the fuzzer of the AMQP 1.0 codec; BASALT_FUZZ_SECONDS makes it longer."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time

import pytest
from tests.fuzz.amqp10_wire import fuzz

ROUNDS = 500
SECONDS = float(os.environ.get("BASALT_FUZZ_SECONDS", "0"))


@pytest.mark.spec("G2")
def test_damaged_frames_and_messages_raise_only_faults() -> None:
    seed = random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {seed} on")
    until = time.monotonic() + SECONDS

    def stop(count: int) -> bool:
        return count >= ROUNDS and time.monotonic() > until

    assert asyncio.run(fuzz(itertools.count(seed), stop)) >= ROUNDS
