"""A short run of the RocketMQ fuzzer; BASALT_FUZZ_SECONDS makes it longer."""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path

import pytest
from tests.fuzz.rocketmq import fuzz
from tests.interop.server import running

ROUNDS = 10
SECONDS = float(os.environ.get("BASALT_FUZZ_SECONDS", "0"))


@pytest.mark.spec("G3", "P13")
def test_random_requests_cause_no_internal_error(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {seed} on")
    until = time.monotonic() + SECONDS

    def stop(count: int) -> bool:
        return count >= ROUNDS and time.monotonic() > until

    with running(tmp_path / "data", "--rocketmq-invisible-ms-min=100") as broker:
        assert fuzz(broker, itertools.count(seed), stop) >= ROUNDS
