"""The service fila.v1.FilaAdmin: queues, runtime settings, redrive, API keys.

A queue created here gets a dead-letter queue with the suffix `.dlq`, because the protocol has no field to name one.
Redrive moves the messages of such a queue back to the queues that they came from.

Secret settings are returned masked (`queues/runtime_config.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from basaltmq.errors import InvalidArgumentError, PreconditionFailedError, QueueNotFoundError
from basaltmq.protocols.grpc.server.methods import Method
from basaltmq.protocols.grpc.services.access import Access, Caller
from basaltmq.protocols.grpc.services.method_factory import MethodFactory, queue_name
from basaltmq.protocols.grpc.services.queue_owner import QueueOwner
from basaltmq.protocols.grpc.services.waiting_consumers import WaitingConsumers
from basaltmq.queues.config import DEAD_LETTERS, VISIBILITY_TIMEOUT_MS_DEFAULT, QueueConfig
from basaltmq.queues.lifecycle.redrive import origin_of
from basaltmq.queues.message import Message
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.runtime_config import LIST_MAX
from basaltmq.wire import fila_wire_pb2 as wire

SERVICE: Final = "fila.v1.FilaAdmin"

CONFIGS_PAGE: Final = 100
"""Queues examined per loop turn."""

QUANTUM: Final = 1
"""Messages per turn of a fairness key."""

NODES: Final = 1


class FilaAdmin:
    """Handlers of fila.v1.FilaAdmin."""

    def __init__(
        self,
        plane: QueuePlane,
        consumers: WaitingConsumers,
        access: Access,
        owner: QueueOwner,
        durable: Callable[[], Awaitable[None]],
    ) -> None:
        """`durable` waits until all previous writes are durable."""
        self._plane = plane
        self._consumers = consumers
        self._keys = access.keys
        self._owner = owner
        self._durable = durable

    def methods(self, calls: MethodFactory) -> dict[str, Method]:
        return {
            "CreateQueue": calls.unary(wire.CreateQueueRequest, self.create_queue),
            "DeleteQueue": calls.unary(wire.DeleteQueueRequest, self.delete_queue),
            "SetConfig": calls.unary(wire.SetConfigRequest, self.set_config),
            "GetConfig": calls.unary(wire.GetConfigRequest, self.get_config),
            "ListConfig": calls.unary(wire.ListConfigRequest, self.list_config),
            "GetStats": calls.unary(wire.GetStatsRequest, self.get_stats),
            "Redrive": calls.unary(wire.RedriveRequest, self.redrive),
            "ListQueues": calls.unary(wire.ListQueuesRequest, self.list_queues),
            "CreateApiKey": calls.unary(wire.CreateApiKeyRequest, self.create_api_key),
            "RevokeApiKey": calls.unary(wire.RevokeApiKeyRequest, self.revoke_api_key),
            "ListApiKeys": calls.unary(wire.ListApiKeysRequest, self.list_api_keys),
            "SetAcl": calls.unary(wire.SetAclRequest, self.set_acl),
            "GetAcl": calls.unary(wire.GetAclRequest, self.get_acl),
        }

    async def create_queue(self, request: wire.CreateQueueRequest, caller: Caller) -> wire.CreateQueueResponse:
        name = queue_name(request.name)
        caller.require("admin", name)
        asked = request.config
        self._owner.create(
            QueueConfig(
                name=name,
                on_enqueue_script=asked.on_enqueue_script or None,
                on_failure_script=asked.on_failure_script or None,
                visibility_timeout_ms=asked.visibility_timeout_ms or VISIBILITY_TIMEOUT_MS_DEFAULT,
                dead_letter_queue=None if name.endswith(DEAD_LETTERS) else name + DEAD_LETTERS,
            )
        )
        await self._durable()
        return wire.CreateQueueResponse(queue_id=name)

    async def delete_queue(self, request: wire.DeleteQueueRequest, caller: Caller) -> wire.DeleteQueueResponse:
        name = queue_name(request.queue)
        caller.require("admin", name)
        self._owner.delete(name)
        await self._durable()
        return wire.DeleteQueueResponse()

    async def set_config(self, request: wire.SetConfigRequest, caller: Caller) -> wire.SetConfigResponse:
        """Set a setting. An empty value, which on the wire is the same as an absent one, deletes it."""
        caller.require_everywhere("admin", "change settings")
        if request.value:
            self._plane.set_setting(request.key, request.value)
        else:
            self._plane.delete_setting(request.key)
        await self._durable()
        return wire.SetConfigResponse()

    async def get_config(self, request: wire.GetConfigRequest, caller: Caller) -> wire.GetConfigResponse:
        caller.require_everywhere("admin", "read settings")
        if not request.key:
            raise InvalidArgumentError("the request has no setting key")
        # The exact key sorts first among the keys with this prefix.
        for setting in self._plane.settings(request.key, limit=1).settings:
            if setting.key == request.key:
                return wire.GetConfigResponse(value=setting.value)
        return wire.GetConfigResponse()

    async def list_config(self, request: wire.ListConfigRequest, caller: Caller) -> wire.ListConfigResponse:
        caller.require_everywhere("admin", "read settings")
        page = self._plane.settings(request.prefix, limit=LIST_MAX)
        entries = [wire.ConfigEntry(key=each.key, value=each.value) for each in page.settings]
        return wire.ListConfigResponse(entries=entries, total_count=page.total)

    async def get_stats(self, request: wire.GetStatsRequest, caller: Caller) -> wire.GetStatsResponse:
        name = queue_name(request.queue)
        caller.require("admin", name)
        counts = self._plane.stats(name)
        active, keys = self._plane.fairness_keys(name)
        return wire.GetStatsResponse(
            depth=_depth(counts),
            in_flight=counts["leased"],
            active_fairness_keys=active,
            active_consumers=self._consumers.push_consumers(name),
            quantum=QUANTUM,
            per_key_stats=[
                wire.FairnessKeyStats(
                    key=each.key, pending_count=each.pending, current_deficit=each.deficit, weight=each.weight
                )
                for each in keys
            ],
            per_throttle_stats=[
                wire.ThrottleKeyStats(
                    key=each.key, tokens=each.tokens, rate_per_second=each.rate_per_s, burst=each.burst
                )
                for each in self._plane.throttle_keys()
            ],
            replication_count=NODES,
        )

    async def redrive(self, request: wire.RedriveRequest, caller: Caller) -> wire.RedriveResponse:
        name = queue_name(request.dlq_queue)
        caller.require("admin", name)
        self._plane.get(name)
        parent = await self._parent_of(name)
        caller.require("admin", parent)
        wanted = request.count or None

        def may_return(message: Message) -> bool:
            # A producer can set the header that names the origin.
            origin = origin_of(message)
            if origin is not None and origin != parent:
                caller.require("admin", origin)
            return True

        moved = await self._redrive(name, None, wanted, may_return)
        if wanted is None or moved < wanted:
            left = None if wanted is None else wanted - moved
            # Messages without an origin were enqueued here directly. They go to the parent queue.
            moved += await self._redrive(name, parent, left, lambda message: origin_of(message) is None)
        await self._durable()
        return wire.RedriveResponse(redriven=moved)

    async def _parent_of(self, name: str) -> str:
        """Return the queue whose dead letters this queue holds."""
        if name.endswith(DEAD_LETTERS):
            parent = name.removesuffix(DEAD_LETTERS)
            try:
                self._plane.get(parent)
            except QueueNotFoundError:
                raise PreconditionFailedError(
                    f"queue {parent!r}, the source of the dead letters in {name!r}, is missing; create it, then redrive"
                ) from None
            return parent
        after = ""
        while page := self._plane.configs(after=after, count=CONFIGS_PAGE):
            for config in page:
                if config.dead_letter_queue == name:
                    return config.name
            after = page[-1].name
            await asyncio.sleep(0)
        raise InvalidArgumentError(
            f"queue {name!r} is not a dead-letter queue: its name does not end in {DEAD_LETTERS!r}, and no queue has "
            "it as its dead-letter queue"
        )

    async def _redrive(
        self, name: str, to: str | None, count: int | None, wanted: Callable[[Message], bool] | None
    ) -> int:
        """Redrive page by page, so that other tasks of the loop can run."""
        moved = 0
        for page in self._plane.redriving(name, to=to, count=count, wanted=wanted):
            moved += page
            await asyncio.sleep(0)
        return moved

    async def list_queues(self, request: wire.ListQueuesRequest, caller: Caller) -> wire.ListQueuesResponse:
        response = wire.ListQueuesResponse(cluster_node_count=NODES)
        after = ""
        while page := self._plane.configs(after=after, count=CONFIGS_PAGE):
            for config in page:
                if caller.sees(config.name):
                    counts = self._plane.stats(config.name)
                    response.queues.add(
                        name=config.name,
                        depth=_depth(counts),
                        in_flight=counts["leased"],
                        active_consumers=self._consumers.push_consumers(config.name),
                    )
            after = page[-1].name
            await asyncio.sleep(0)
        return response

    async def create_api_key(self, request: wire.CreateApiKeyRequest, caller: Caller) -> wire.CreateApiKeyResponse:
        caller.require_superadmin("create API keys")
        key, text = self._keys.create(
            request.name, expires_ms=request.expires_at_ms, is_superadmin=request.is_superadmin
        )
        await self._durable()
        return wire.CreateApiKeyResponse(key_id=key.id, key=text, is_superadmin=key.is_superadmin)

    async def revoke_api_key(self, request: wire.RevokeApiKeyRequest, caller: Caller) -> wire.RevokeApiKeyResponse:
        caller.require_superadmin("revoke API keys")
        self._keys.revoke(request.key_id)
        await self._durable()
        return wire.RevokeApiKeyResponse()

    async def list_api_keys(self, request: wire.ListApiKeysRequest, caller: Caller) -> wire.ListApiKeysResponse:
        caller.require_superadmin("list API keys")
        return wire.ListApiKeysResponse(
            keys=[
                wire.ApiKeyInfo(
                    key_id=key.id,
                    name=key.name,
                    created_at_ms=key.row.created_ms,
                    expires_at_ms=key.row.expires_ms,
                    is_superadmin=key.is_superadmin,
                )
                for key in self._keys.all()
            ]
        )

    async def set_acl(self, request: wire.SetAclRequest, caller: Caller) -> wire.SetAclResponse:
        caller.require_superadmin("change the permissions of API keys")
        self._keys.permit(request.key_id, [(each.kind, each.pattern) for each in request.permissions])
        await self._durable()
        return wire.SetAclResponse()

    async def get_acl(self, request: wire.GetAclRequest, caller: Caller) -> wire.GetAclResponse:
        caller.require_superadmin("read the permissions of API keys")
        key = self._keys.get(request.key_id)
        permissions = [wire.AclPermission(kind=each.kind, pattern=each.pattern) for each in key.permissions]
        return wire.GetAclResponse(key_id=key.id, permissions=permissions, is_superadmin=key.is_superadmin)


def _depth(counts: dict[str, int]) -> int:
    """Return the number of messages without a consumer: ready, or delayed."""
    return counts["ready"] + counts["delayed"]
