"""Routes for queues: read, declare, delete, purge, get and move messages."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec

from basaltmq.admin.http.message import HttpError, Response
from basaltmq.admin.http.paging import listing
from basaltmq.admin.http.routes import Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.monitoring.rates import Rates
from basaltmq.admin.objects.bindings import default_binding, shown_binding
from basaltmq.admin.objects.connections import shown_consumer
from basaltmq.admin.objects.json_tables import shown_payload, shown_properties, shown_table, table_of
from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.guard import Guard
from basaltmq.broker.message import properties
from basaltmq.broker.message.operations import ACK, REJECT, REQUEUE, Settlement
from basaltmq.broker.routing.exchange import QUEUE, Destination
from basaltmq.broker.scheduling.turns import Turns, in_turns
from basaltmq.broker.vhost import VHost
from basaltmq.errors import InvalidArgumentError, QueueNotFoundError

GET_MAX: Final = 1_000
"""Messages per get request."""

GET_BYTES_MAX: Final = 16 << 20
"""Payload bytes per response, which is built in memory. The response ends early at this limit."""

BROWSED_PER_TURN: Final = 50
"""Messages read per loop turn, fewer if they are large."""

MOVED_PER_TURN: Final = 500
MOVED_BYTES_PER_TURN: Final = 16 << 20
"""Messages and bytes per moved batch, so that other tasks run in between."""


OUTCOMES: Final = {
    "ack_requeue_true": REQUEUE,
    "reject_requeue_true": REQUEUE,
    "ack_requeue_false": ACK,
    "reject_requeue_false": REJECT,
}
"""What happens to the messages of a get request, by its ackmode."""


class QueueSpec(msgspec.Struct):
    """Body of a request to declare a queue."""

    durable: bool = True
    auto_delete: bool = False
    arguments: dict[str, Any] = {}
    node: str | None = None


class GetSpec(msgspec.Struct):
    """Body of a get request: which messages, and what happens to them."""

    count: Annotated[int, msgspec.Meta(ge=1, le=GET_MAX)] = 1
    ackmode: Literal["peek", "ack_requeue_true", "reject_requeue_true", "ack_requeue_false", "reject_requeue_false"] = (
        "ack_requeue_true"
    )
    encoding: Literal["auto", "base64"] = "auto"
    truncate: Annotated[int, msgspec.Meta(ge=0)] | None = None


class MoveSpec(msgspec.Struct):
    """Body of a request to move messages."""

    destination: str
    count: Annotated[int, msgspec.Meta(ge=1)] | None = None


def shown_queue(vhost: VHost, queue: BrokerQueue, rates: Rates, *, node: str) -> dict[str, Any]:
    """Return a queue for JSON."""
    counts = vhost.counts(queue)
    ready, unacked = counts.get("ready", 0), counts.get("leased", 0)
    policy = vhost.policies.of_queue(queue.name, queue.type)
    failure = vhost.plane.damage.error_of(queue.name)
    return {
        "name": queue.name,
        "vhost": vhost.name,
        "type": queue.type,
        "durable": queue.declared.durable,
        "auto_delete": queue.declared.auto_delete,
        "exclusive": queue.declared.exclusive,
        "arguments": shown_table(queue.declared.arguments),
        "policy": policy.name,
        "effective_policy_definition": dict(policy.definition),
        "node": node,
        "state": "running" if failure is None else "down",
        "error": failure,
        "quarantined": counts.get("quarantined", 0),
        "consumers": len(queue.consumers),
        "messages": ready + unacked,
        "messages_ready": ready,
        "messages_unacknowledged": unacked,
        "messages_delayed": counts.get("delayed", 0),
        "message_bytes": counts.get("size_bytes", 0) + counts.get("transient_bytes", 0),
        "message_bytes_ready": counts.get("ready_bytes", 0),
        "message_stats": rates.stats(
            (vhost.name, queue.name),
            queue,
            {
                "publish": queue.published,
                "deliver_get": queue.delivered,
                "redeliver": queue.redelivered,
                "ack": counts.get("acked", 0),
                "expired": counts.get("expired", 0),
                "dead_lettered": counts.get("dead_lettered", 0),
                "dropped": counts.get("dropped", 0),
            },
        ),
    }


class Queues:
    """Handlers of /api/queues."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._rates = Rates()

    def routes(self) -> list[Route]:
        one = "/api/queues/{vhost}/{name}"
        return [
            Route("GET", "/api/queues", self.listed, "Queues of all visible virtual hosts.", paged=True),
            Route("GET", "/api/queues/{vhost}", self.listed, "Queues of a virtual host.", paged=True),
            Route("GET", one, self.one, "A queue with its counts, settings and consumers."),
            Route("PUT", one, self.declare, "Declare a queue.", takes=QueueSpec, optional_body=True,
                  returns="201 if it was created, 204 if it existed with the same settings."),
            Route("DELETE", one, self.delete, "Delete a queue with its messages.",
                  query={"if-empty": "true: only if it is empty.", "if-unused": "true: only without consumers."}),
            Route("GET", one + "/bindings", self.bindings, "Bindings whose destination is a queue."),
            Route("DELETE", one + "/contents", self.purge, "Delete all ready messages."),
            Route("POST", one + "/get", self.get, "Read messages, or remove them.", takes=GetSpec,
                  returns="A list of messages. peek leaves them unchanged; ack_requeue_true and reject_requeue_true "
                          "return them, marked as redelivered; ack_requeue_false deletes them; reject_requeue_false "
                          "dead-letters them."),
            Route("POST", one + "/move", self.move, "Move ready messages to another queue of the virtual host.",
                  takes=MoveSpec, returns="The number of moved messages. A crash neither loses nor duplicates one."),
        ]  # fmt: skip

    def _shown(self, pair: tuple[VHost, str]) -> dict[str, Any] | None:
        vhost, name = pair
        queue = vhost.queues.by_name.get(name)
        return None if queue is None else shown_queue(vhost, queue, self._rates, node=self._scope.node_name)

    async def listed(self, call: Call) -> Any:
        names = []
        for vhost in self._scope.listed(call):
            names += await _named(vhost)
        return await listing(call, names, self._shown)

    def one(self, call: Call) -> Any:
        vhost = self._scope.vhost(call)
        queue = _queue(vhost, call.names["name"])
        shown = shown_queue(vhost, queue, self._rates, node=self._scope.node_name)
        shown["consumer_details"] = [shown_consumer(vhost, each) for each in queue.consumers]
        shown["scripts"] = {} if queue.is_stream else vhost.plane.script_counters(queue.name)
        return shown

    def declare(self, call: Call) -> Any:
        vhost, name, spec = self._scope.vhost(call), call.names["name"], call.body
        self._scope.check(call, vhost, "configure", name)
        dead_letters = spec.arguments.get("x-dead-letter-exchange")
        if isinstance(dead_letters, str):
            self._scope.check(call, vhost, "read", name)
            self._scope.check(call, vhost, "write", dead_letters)
        existed = name in vhost.queues.by_name
        vhost.declare_queue(
            name,
            durable=spec.durable,
            exclusive=False,
            auto_delete=spec.auto_delete,
            arguments=table_of(spec.arguments),
            passive=False,
            owner=None,
        )
        return Response(204 if existed else 201)

    async def delete(self, call: Call) -> None:
        vhost, name = self._scope.vhost(call), call.names["name"]
        self._scope.check(call, vhost, "configure", name)
        _queue(vhost, name)
        if_unused, if_empty = call.flag("if-unused"), call.flag("if-empty")
        vhost.check_delete(name, if_unused=if_unused, if_empty=if_empty, owner=None)
        await in_turns(vhost.unbinding(QUEUE, name), int)
        vhost.delete_queue(name, if_unused=if_unused, if_empty=if_empty, owner=None)

    async def bindings(self, call: Call) -> Any:
        vhost, name = self._scope.vhost(call), call.names["name"]
        _queue(vhost, name)
        found = vhost.topology.bindings_to(Destination(QUEUE, name))
        return [default_binding(vhost.name, name), *await in_turns(found, partial(shown_binding, vhost.name))]

    async def purge(self, call: Call) -> None:
        vhost, name = self._scope.vhost(call), call.names["name"]
        self._scope.check(call, vhost, "read", name)
        await in_turns(vhost.purging(name, owner=None), int)

    async def get(self, call: Call) -> Any:
        vhost, name, spec = self._scope.vhost(call), call.names["name"], call.body
        self._scope.check(call, vhost, "read", name)
        queue = vhost.queues.get(name)
        if queue.is_stream:
            raise InvalidArgumentError(f"queue {name!r} is a stream; consume it with an offset instead")
        if spec.ackmode == "peek":
            return await self._browse(vhost, queue, spec)
        outcome = OUTCOMES[spec.ackmode]
        shown: list[dict[str, Any]] = []
        settlements: list[Settlement] = []
        size_bytes = 0
        turns = Turns()
        try:
            while len(shown) < spec.count and size_bytes < GET_BYTES_MAX:
                found = vhost.get(name, no_ack=False, owner=None)
                if found is None:
                    break
                delivery, left = found
                settlements.append(Settlement(name, delivery.token, [delivery.id], outcome))
                shown.append(_message(delivery.properties, delivery.payload, spec, delivery.redelivered, left))
                size_bytes += len(delivery.payload)
                await turns.yield_if_due()
        except BaseException:
            # The client does not receive these messages, so return them to the queue.
            vhost.settle([each._replace(outcome=REQUEUE) for each in settlements])
            raise
        vhost.settle(settlements)
        return shown

    async def _browse(self, vhost: VHost, queue: BrokerQueue, spec: GetSpec) -> list[dict[str, Any]]:
        counts = vhost.counts(queue)
        left = counts.get("ready", 0)
        shown: list[dict[str, Any]] = []
        size_bytes = 0
        after = b""
        at_once = _fitting(counts.get("ready_bytes", 0) // max(1, left), GET_BYTES_MAX, BROWSED_PER_TURN)
        while len(shown) < spec.count and size_bytes < GET_BYTES_MAX:
            with Guard(vhost):
                page, after = vhost.plane.browse_page(queue.name, min(at_once, spec.count - len(shown)), after=after)
            if not page:
                break
            for message in page:
                left -= 1
                shown.append(_message(message.properties, message.payload, spec, False, max(0, left)))
                size_bytes += len(message.payload)
            at_once = _fitting(size_bytes // len(shown), GET_BYTES_MAX - size_bytes, BROWSED_PER_TURN)
            await asyncio.sleep(0)
        return shown

    async def move(self, call: Call) -> Any:
        vhost, name, spec = self._scope.vhost(call), call.names["name"], call.body
        self._scope.check(call, vhost, "read", name)
        self._scope.check(call, vhost, "write", spec.destination)
        if name == spec.destination:
            raise HttpError(400, "the destination must be another queue")
        vhost.queues.get(name)
        vhost.queues.get(spec.destination)
        moved = 0
        counts = vhost.counts(vhost.queues.get(name))
        average_bytes = counts.get("ready_bytes", 0) // max(1, counts.get("ready", 0))
        at_once = _fitting(average_bytes, MOVED_BYTES_PER_TURN, MOVED_PER_TURN)
        while spec.count is None or moved < spec.count:
            wanted = at_once if spec.count is None else min(at_once, spec.count - moved)
            with Guard(vhost):
                done = vhost.plane.move(name, spec.destination, count=wanted)
            moved += done
            if done < wanted:
                break
            await asyncio.sleep(0)
        await vhost.commit.durable()
        return {"moved": moved}


def _fitting(average_bytes: int, room_bytes: int, most: int) -> int:
    """Return how many messages of this size fit, at least one."""
    return max(1, min(most, room_bytes // max(1, average_bytes)))


async def _named(vhost: VHost) -> list[tuple[str, tuple[VHost, str]]]:
    return await in_turns(list(vhost.queues.by_name), lambda name: (name, (vhost, name)))


def _queue(vhost: VHost, name: str) -> BrokerQueue:
    """Return a queue, even if it is exclusive to a connection."""
    found = vhost.queues.by_name.get(name)
    if found is None:
        raise QueueNotFoundError(f"no queue '{name}' in vhost '{vhost.name}'")
    return found


def _message(envelope: bytes, payload: bytes, spec: GetSpec, redelivered: bool, left: int) -> dict[str, Any]:
    exchange, routing_key, raw = properties.decode_envelope(envelope) if envelope else ("", "", properties.NONE)
    text, encoding = shown_payload(payload, spec.encoding, spec.truncate)
    return {
        "payload_bytes": len(payload),
        "redelivered": redelivered,
        "exchange": exchange,
        "routing_key": routing_key,
        "message_count": left,
        "properties": shown_properties(raw),
        "payload": text,
        "payload_encoding": encoding,
    }
