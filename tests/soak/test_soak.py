"""Two minutes of the soak, with a fixed seed so that CI repeats itself.

BASALT_SOAK_SEED=7 or random      BASALT_SOAK_SECONDS=600      BASALT_SOAK_KINDS=segment,ring or all
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.soak.corruption import chosen_kinds
from tests.soak.soak import Soak

SEED = 20_260
SECONDS = float(os.environ.get("BASALT_SOAK_SECONDS", "120"))
SLACK_S = 480.0
"""Additional time for the final drain on a busy machine."""


@pytest.mark.promise("P1", "P2", "P3", "P7", "P11")
@pytest.mark.timeout(SECONDS + SLACK_S)
def test_no_confirmed_message_is_lost_and_no_acked_one_returns(tmp_path: Path) -> None:
    text = os.environ.get("BASALT_SOAK_SEED", str(SEED))
    seed = random.SystemRandom().randrange(1 << 32) if text == "random" else int(text)
    kinds = os.environ.get("BASALT_SOAK_KINDS", "")
    print(f"seed {seed}")
    problems = Soak(tmp_path, SECONDS, seed, chosen_kinds(kinds)).run()
    again = f"python -m tests.soak --seed {seed} --seconds {SECONDS:.0f}" + (f" --kinds {kinds}" if kinds else "")
    assert not problems, "\n".join([*problems, f"repeat with: {again}"])
