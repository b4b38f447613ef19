"""Groups that many clients use for the first time at once are created in few batches (P13)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.broker.rig import run

from basaltmq.broker.vhost import VHost
from basaltmq.errors import AccessRefusedError
from basaltmq.protocols.rocketmq.clients import Clients
from basaltmq.protocols.rocketmq.host import GROUPS_AT_ONCE, Host
from basaltmq.protocols.rocketmq.settings import Settings
from basaltmq.streams.pop.groups import GroupConfig

pytestmark = [pytest.mark.spec("G3"), pytest.mark.promise("P13")]

NODE: Any = None
"""These requests do not reach it."""


def host_of(vhost: VHost) -> Host:
    return Host(NODE, vhost, Settings(), Clients(lambda: 0.0))


def test_new_groups_of_many_clients_share_batches() -> None:
    async def work(vhost: VHost) -> None:
        host = host_of(vhost)
        batches: list[int] = []
        create_many = host.plane.catalog.create_many

        def counted(objects: Any, **given: Any) -> Any:
            batches.append(len(objects))
            return create_many(objects, **given)

        host.plane.catalog.create_many = counted  # type: ignore[method-assign]
        names = [f"g{number % 250}" for number in range(500)]
        found = await asyncio.gather(*(host.group_or_new(name, GroupConfig(), lambda: True) for name in names))
        assert found == [GroupConfig()] * 500
        assert sum(batches) == 250, "each group once"
        assert max(batches) <= GROUPS_AT_ONCE + 1
        assert len(batches) <= 4
        host.close()

    run(work)


def test_a_group_that_is_deleted_does_not_return_with_another_one() -> None:
    async def work(vhost: VHost) -> None:
        host = host_of(vhost)
        both = (host.group_or_new("first", GroupConfig(), lambda: True) for _ in range(2))
        await asyncio.gather(*both)
        host.groups.delete("first")
        await host.group_or_new("second", GroupConfig(), lambda: True)
        assert host.groups.find("first") is None
        with pytest.raises(AccessRefusedError):
            await host.group_or_new("first", GroupConfig(), lambda: False)
        host.close()

    run(work)
