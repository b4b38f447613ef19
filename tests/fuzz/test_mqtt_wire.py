"""A short run of the fuzzer of the MQTT codec; BASALT_FUZZ_SECONDS makes it longer."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time

import pytest
from tests.fuzz.mqtt_wire import fuzz

ROUNDS = 300
SECONDS = float(os.environ.get("BASALT_FUZZ_SECONDS", "0"))


@pytest.mark.mqtt("MQTT-3.1.4-1", "MQTT-4.13.1-1")
def test_damaged_packets_raise_only_reportable_errors() -> None:
    seed = random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {seed} on")
    until = time.monotonic() + SECONDS

    def stop(count: int) -> bool:
        return count >= ROUNDS and time.monotonic() > until

    assert asyncio.run(fuzz(itertools.count(seed), stop)) >= ROUNDS
