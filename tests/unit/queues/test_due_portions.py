"""Due work and limits are processed in batches, with other operations in between (P13)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from tests.unit.queues.conftest import Clock

from basaltmq.queues.draft import Draft
from basaltmq.queues.due import FOLLOW_UP_MAX
from basaltmq.queues.lifecycle.limits import DROP_MAX
from basaltmq.queues.lifecycle.ttl import EXPIRE_MAX
from basaltmq.queues.plane import QueuePlane

pytestmark = pytest.mark.promise("P13")
CALLS_MAX = 1000
Make = Callable[..., str]


@pytest.mark.spec("E7")
def test_many_expired_messages_are_removed_in_batches(plane: QueuePlane, make: Make, clock: Clock) -> None:
    make("q", dead_letter_queue="dead")
    plane.enqueue("q", [Draft(payload=b"%d" % number, ttl_ms=1000) for number in range(5000)])
    clock.pass_ms(1001)
    before = 5000
    for _ in range(CALLS_MAX):
        deadline = plane.run_due(clock())
        left = plane.stats("q")["ready"]
        assert before - left <= 2 * EXPIRE_MAX
        before = left
        if not left:
            break
        assert deadline is not None
        assert deadline <= clock(), "the rest is due at once"
    assert plane.stats("dead")["ready"] == 5000


@pytest.mark.spec("E7")
def test_lowered_limit_is_enforced_in_batches(plane: QueuePlane, make: Make, clock: Clock) -> None:
    make("q")
    plane.enqueue("q", [b"%d" % number for number in range(5000)])
    plane.update(msgspec.structs.replace(plane.get("q"), length_max=10))
    assert 5000 - plane.stats("q")["ready"] <= FOLLOW_UP_MAX * DROP_MAX
    for _ in range(CALLS_MAX):
        before = plane.stats("q")["ready"]
        if before == 10:
            break
        plane.run_due(clock())
        assert before - plane.stats("q")["ready"] <= 2 * FOLLOW_UP_MAX * DROP_MAX
    assert [message.payload for message in plane.browse("q")] == [b"%d" % number for number in range(4990, 5000)]
