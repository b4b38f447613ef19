"""The batch of a turn keeps the order of every queue, for all combinations of shared bodies."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.publishing.tick_batch import TickBatch
from basaltmq.queues.draft import Draft

NAMES = "abc"


def order_of(messages: list[list[str]]) -> dict[str, list[bytes]]:
    """Return the messages of each queue after a turn with messages for these queues."""
    batch = TickBatch()
    # Steps only compare queues by identity, so a name can replace a queue.
    for number, names in enumerate(messages):
        draft = Draft(payload=b"%d" % number)
        queues = cast("list[BrokerQueue]", names)
        if len(queues) == 1:
            batch.add(queues[0], draft)
        else:
            batch.add_shared(queues, draft)
    found: dict[str, list[bytes]] = {name: [] for name in NAMES}
    for queues_of_step, drafts in batch.steps:
        for name in cast("tuple[str, ...]", queues_of_step):
            found[name] += [draft.payload for draft in drafts]
    return found


@pytest.mark.promise("P3")
@given(st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True), max_size=12))
def test_every_queue_keeps_the_publish_order(messages: list[list[str]]) -> None:
    expected = {name: [b"%d" % at for at, names in enumerate(messages) if name in names] for name in NAMES}
    assert order_of(messages) == expected


def test_messages_to_the_same_queues_are_one_operation() -> None:
    batch = TickBatch()
    together = cast("list[BrokerQueue]", ["a", "b"])
    for number in range(5):
        batch.add_shared(together, Draft(payload=b"%d" % number))
    assert len(batch.steps) == 1
