"""A short run of the fuzzer of AMQP 1.0 over sockets."""

from __future__ import annotations

import random

import pytest
from tests.fuzz.amqp10_served import check, one_session, prepare
from tests.interop.server import running

ROUNDS = 60


@pytest.mark.spec("G2")
def test_no_order_of_performatives_breaks_the_broker(tmp_path_factory: pytest.TempPathFactory) -> None:
    seed = random.SystemRandom().randrange(1 << 40)
    print(f"seeds from {seed} on")
    with running(tmp_path_factory.mktemp("fuzz") / "data") as broker:
        prepare(broker)
        for number in range(ROUNDS):
            one_session(broker.port(), seed + number)
        check(broker)
