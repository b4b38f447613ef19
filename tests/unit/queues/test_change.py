"""Changes leave no reference cycles, so their batches are freed without the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from tests.unit.queues.conftest import TestStore

from basaltmq.durability import Durability
from basaltmq.errors import StoreStalledError
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.sync.group_commit import GroupCommit


@pytest.fixture
def quiet_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.promise("P8", "P13")
@pytest.mark.usefixtures("quiet_collector")
def test_operations_leave_no_reference_cycles() -> None:
    store = TestStore()
    with closing(GroupCommit(store)) as commit, QueuePlane(store, commit) as plane:
        for name in ("q", "r"):
            plane.create(QueueConfig(name=name, durability=Durability.WRITTEN))
        gc.collect()
        plane.enqueue("q", [b"x"] * 10)
        plane.publish(["q", "r"], b"x" * 3000)
        leased = plane.lease("q", 5)
        token = leased[0].token
        plane.ack("q", token, [leased[0].id])
        plane.nack("q", token, [leased[1].id])
        plane.release("q", token, [leased[2].id])
        with plane.change():
            plane.enqueue("r", [b"x"])
            plane.ack("q", token)
        store.refuse = 1
        with suppress(StoreStalledError):
            plane.enqueue("q", [b"x"])
        plane.purge("q")
        assert gc.collect() == 0
