"""A link on which the client sends: its deliveries are published to an exchange or a queue.

    transfer frames ─> delivery ─> publish ─> written and synced ─> accepted
                                         ├─> a queue is full    ─> rejected
                                         └─> no queue           ─> released

The link gives credit for `CREDIT` deliveries that are not confirmed yet. The credit is lower if a queue limits its
publishers because its consumers are behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from basaltmq.broker.message import properties
from basaltmq.broker.message.operations import RowChange
from basaltmq.broker.scheduling.loop_shares import DRAFT_S
from basaltmq.errors import BasaltError
from basaltmq.protocols.amqp10 import addresses
from basaltmq.protocols.amqp10.addresses import Node
from basaltmq.protocols.amqp10.durable_links import DurableLinks
from basaltmq.protocols.amqp10.link import Link
from basaltmq.protocols.amqp10.message import Received, with_origin
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire.errors import (
    DECODE_ERROR,
    INVALID_FIELD,
    MESSAGE_SIZE,
    NOT_FOUND,
    RESOURCE_LIMIT,
    TRANSFER_LIMIT,
    UNAUTHORIZED,
    Fault,
    LinkFault,
    condition_of,
)
from basaltmq.protocols.amqp10.wire.frames import ACCEPTED
from basaltmq.protocols.amqp10.wire.types import Described
from basaltmq.protocols.frame_buffer import add_part

if TYPE_CHECKING:
    from basaltmq.protocols.amqp10.input import Wait
    from basaltmq.protocols.amqp10.session import Session

CREDIT: Final = 1000
"""Deliveries of a link that are not confirmed. One sync confirms them all, and a disk does some hundred per second."""

LARGE_BYTES_MIN: Final = 16 << 10
"""Bodies from this size wait while the store is behind with flushes."""

DELAY_S: Final = 0.005
"""Delay of a large body. A flush of a memtable takes 20 to 100 ms."""

DEFAULT_EXCHANGE_RESOURCE: Final = "amq.default"
"""Name of the default exchange in permissions."""

_RELEASED: Final = p.encode(p.Released())
_FULL: Final = p.encode(p.Rejected(error=p.error_of(RESOURCE_LIMIT, "a queue is full, or has refused the message")))
IMPERSONATOR: Final = "impersonator"
"""Tag of users who may set any user id."""

_TAG_BYTES: Final = 40
_ATTACH_TAGS: Final = 100
"""Space for the unsettled map in our attach: bytes per entry, and the space of the other fields, in entries."""

_U32: Final = 0xFFFF_FFFF


class _Delivery:
    """A delivery whose last frame has not arrived."""

    __slots__ = ("delivery_id", "is_settled", "parts", "size", "state", "tag")

    def __init__(self, delivery_id: int, tag: bytes) -> None:
        self.delivery_id = delivery_id
        self.tag = tag
        self.is_settled = False
        self.state: object = None
        self.parts: list[bytes] = []
        self.size = 0


class Receiver(Link):
    """A link on which the client sends."""

    __slots__ = (
        "_checked",
        "_credit",
        "_delivery",
        "_durable",
        "_is_waiting",
        "_known",
        "_number",
        "_pending",
        "_released",
        "_tags",
        "is_dynamic",
        "is_topic",
        "node",
        "rcv_settle_mode",
        "received",
        "unconfirmed",
        "unsettled",
    )

    def __init__(self, session: Session, attach: p.Attach) -> None:
        super().__init__(session, attach)
        self.node: Node | None = None
        """The target; None: each message names its own."""
        self.rcv_settle_mode = attach.rcv_settle_mode or p.FIRST
        self.received = 0
        """Delivery count of the link."""
        self.unconfirmed = 0
        self.is_dynamic = False
        self.is_topic = False
        """The target is a topic (JMS), to which a message may be published without subscribers."""
        self.unsettled: dict[int, None] = {}
        """Deliveries whose outcome we have sent, and that the client has not settled (mode `second`)."""
        self._credit = 0
        self._number = 0
        self._delivery: _Delivery | None = None
        self._pending: dict[int, tuple[int, int, bool]] = {}
        """Unconfirmed messages by their number: delivery id, size, and whether a topic of JMS gets it."""
        self._released: set[int] = set()
        self._checked: set[tuple[str, str]] = set()
        self._is_waiting = False
        self._durable: tuple[DurableLinks, str, str] | None = None
        """The durable links of the virtual host, container and name, if this is one."""
        self._known: set[bytes] = set()
        """Tags of messages that an earlier link has stored, and that the client has not settled."""
        self._tags: dict[int, bytes] = {}
        """Tags by delivery id, of a durable link."""

    def open(self) -> None:
        """Find the target and answer the attach."""
        attach = self.attach
        assert attach is not None
        if isinstance(attach.target, p.Coordinator):
            self.session.connection.coordinator.open(self)
            return
        target = p.expect(attach.target, p.Target)
        if target is None:
            raise LinkFault(INVALID_FIELD, "the link has no target")
        if target.dynamic:
            is_topic = "temporary-topic" in (target.capabilities or ())
            connection = self.session.connection
            self.node = connection.dynamic_nodes.create(connection, target.dynamic_node_properties, is_topic=is_topic)
            self.is_dynamic = True
            target.address = addresses.address_of(self.node)
        elif target.address is not None:
            self.is_topic = not addresses.TOPICS.isdisjoint(target.capabilities or ())
            node = addresses.parse(target.address, self.vhost, is_topic=self.is_topic)
            self._require(node)
            self.node = node
            self.session.connection.dynamic_nodes.joined(node)
        if self._is_durable(target):
            self._take_over(target)
            return
        target.durable = p.NONE
        self.saved(target)

    def saved(self, target: p.Target, unsettled: Sequence[bytes] = ()) -> None:
        """Answer the attach. A durable link is stored, and so are the messages of its unsettled map."""
        if self.attach is None or self.is_ending or not self.session.is_open:
            return
        room = self.session.connection.frame_bytes_max // _TAG_BYTES - _ATTACH_TAGS
        self.answer(
            source=self.attach.source,
            target=target,
            unsettled={tag: p.Accepted() for tag in unsettled[: max(0, room)]} or None,
            incomplete_unsettled=True if len(unsettled) > max(0, room) else None,
            max_message_size=self.session.connection.server.limits.message_bytes_max,
        )
        self.top_up()

    def _is_durable(self, target: p.Target) -> bool:
        """Whether the state of deliveries is durable: only if both sides keep it until the client settles."""
        return bool(target.durable) and target.expiry_policy == "never" and self.rcv_settle_mode == p.SECOND

    def _take_over(self, target: p.Target) -> None:
        """Find the durable link of this container and name, and take it from an earlier connection."""
        attach, connection = self.attach, self.session.connection
        assert attach is not None, "the attach is not answered"
        links, container = connection.server.durable_links(self.vhost), connection.container_id
        # What an earlier connection has published must be visible in the rows.
        self.vhost.tick.flush()
        if self.vhost.tick.gathered:
            raise LinkFault(RESOURCE_LIMIT, "the store is stalled; attach again later")
        stored, given = links.received(container, self.name), attach.unsettled or {}
        forgotten = [] if attach.incomplete_unsettled else [tag for tag in stored if tag not in given]
        if forgotten:
            # The client has settled them, although its disposition did not arrive.
            self.vhost.write_rows(RowChange(links.tag_rows(container, self.name, forgotten, None)))
        self._known = set(stored) - set(forgotten)
        self._durable = (links, container, self.name)
        kept = [tag for tag in stored if tag in self._known]
        links.save_target(container, self.name, target, _Saved(self, target, kept))

    def _require(self, node: Node) -> None:
        """Check that the node exists and that the user may publish to it."""
        if node.is_queue:
            if node.queue not in self.vhost.queues.by_name:
                raise LinkFault(NOT_FOUND, f"no queue '{node.queue:.200}' in vhost '{self.vhost.name}'")
            self.session.connection.check("write", DEFAULT_EXCHANGE_RESOURCE)
        else:
            self.vhost.check_exchange(node.exchange)
            self.session.connection.check("write", node.exchange or DEFAULT_EXCHANGE_RESOURCE)

    def transfer(self, fields: list[Any], raw: bytes, at: int, end: int) -> Wait | None:
        """Handle a transfer frame. Return a function that schedules a retry, if the message has to wait."""
        delivery = self._delivery
        if delivery is None:
            delivery = self._begin(fields)
        elif fields[1] is not None and fields[1] != delivery.delivery_id:
            raise LinkFault(INVALID_FIELD, "a transfer has another delivery-id than the incomplete delivery before it")
        if fields[9]:
            # Aborted: the client discards the delivery, which counts as settled.
            self._delivery = None
            self._count_bytes(-delivery.size)
            self.top_up()
            return None
        if fields[4]:
            delivery.is_settled = True
        if fields[7] is not None:
            delivery.state = p.of_described(fields[7]) if isinstance(fields[7], Described) else None
        size = end - at
        delivery.size += size
        if delivery.size > self.session.connection.server.limits.message_bytes_max + (64 << 10):
            raise LinkFault(
                MESSAGE_SIZE, f"a message exceeds {self.session.connection.server.limits.message_bytes_max} bytes"
            )
        if fields[5]:
            self._count_bytes(size)
            add_part(delivery.parts, raw[at:end])
            self._delivery = delivery
            return None
        self._delivery = None
        payload = raw[at:end]
        if delivery.parts:
            self._count_bytes(size - delivery.size)
            delivery.parts.append(payload)
            payload = b"".join(delivery.parts)
        return self._complete(delivery, payload)

    def _begin(self, fields: list[Any]) -> _Delivery:
        if not isinstance(fields[1], int) or not isinstance(fields[2], bytes) or len(fields[2]) > 32:
            raise LinkFault(
                INVALID_FIELD, "the first transfer of a delivery needs a delivery-id and a tag of up to 32 bytes"
            )
        if fields[3]:
            raise LinkFault(DECODE_ERROR, f"message format {fields[3]!r:.20} is not supported; use 0")
        if self._credit <= 0:
            raise LinkFault(TRANSFER_LIMIT, "the link has no credit for this transfer")
        self._credit -= 1
        self.received = (self.received + 1) & _U32
        return _Delivery(fields[1], fields[2])

    def _count_bytes(self, size: int) -> None:
        self.session.connection.usage.count_partial(size)

    def _complete(self, delivery: _Delivery, payload: bytes) -> Wait | None:
        if delivery.tag in self._known:
            self._resume(delivery)
            return None
        if self.complete(delivery.delivery_id, payload, is_settled=delivery.is_settled):
            return None
        try:
            message = self.session.connection.incoming.convert(payload)
        except Fault as fault:
            raise LinkFault(fault.condition, fault.text) from None
        return self._publish(delivery, message)

    def _resume(self, delivery: _Delivery) -> None:
        """Answer a resumed delivery whose message an earlier link has stored."""
        self._known.discard(delivery.tag)
        if delivery.is_settled:
            self._forget([delivery.tag])
        else:
            self._tags[delivery.delivery_id] = delivery.tag
        self._outcome(delivery, ACCEPTED)

    def _forget(self, tags: list[bytes]) -> None:
        """Delete the state of deliveries that the client has settled."""
        if self._durable is not None and tags and self.vhost.is_up:
            links, container, name = self._durable
            self.vhost.write_rows(RowChange(links.tag_rows(container, name, tags, None)))

    def complete(self, delivery_id: int, payload: bytes, *, is_settled: bool) -> bool:
        """Handle a delivery that is a command, not a message. Return whether it was one."""
        coordinator = self.session.connection.coordinator
        if not coordinator.is_control(self):
            return False
        coordinator.command(self, delivery_id, payload)
        return True

    def _publish(self, delivery: _Delivery, message: Received) -> Wait | None:
        """Publish a message. Return a function that schedules a retry, if it has to wait."""
        connection, vhost = self.session.connection, self.vhost
        try:
            exchange, key = self._route(message)
        except LinkFault as fault:
            if self.node is not None:
                raise
            # Anonymous terminus: a bad address concerns this message only.
            self._outcome(delivery, p.encode(p.Rejected(error=p.error_of(fault.condition, fault.text))))
            return None
        except BasaltError as error:
            if self.node is not None:
                raise
            self._outcome(delivery, p.encode(p.Rejected(error=p.error_of(condition_of(error), str(error)))))
            return None
        raw, body = message.properties, message.body
        if connection.has_no_local:
            raw = with_origin(raw, connection.container_id)
        if len(body) >= LARGE_BYTES_MIN and vhost.delays_large():
            wait: Wait = partial(connection.server.loop.call_later, DELAY_S)
            connection.input.park(partial(self._publish, delivery, message))
            return wait
        route = vhost.tick.router.known_route(exchange, key)
        if route.is_costly:
            cost_s = route.fan_out_s(is_transient=False)
            shares = connection.server.shares
            if not shares.has_room(cost_s):
                connection.input.park(partial(self._publish, delivery, message))
                return shares.call_without_debt
            shares.add_debt(cost_s)
        connection.input.later_s += DRAFT_S
        if not connection.usage.is_checked(raw):
            self._check_properties(raw)
        connection.is_publisher = True
        number = 0
        if isinstance(delivery.state, p.TransactionalState):
            # A topic needs no subscribers.
            is_routed = bool(route.fan_out) or self.is_topic or message.is_to_topic
            published = (self, exchange, key, raw, body, True, 0)
            connection.coordinator.publish(delivery.state, published, route, is_routed=is_routed)
            if not delivery.is_settled:
                state = p.TransactionalState(txn_id=delivery.state.txn_id, outcome=p.Accepted())
                self._confirm([delivery.delivery_id], p.encode(state))
            self.top_up()
            return None
        if not delivery.is_settled:
            self._number = number = self._number + 1
            self._pending[number] = (delivery.delivery_id, len(body), self.is_topic or message.is_to_topic)
            self.unconfirmed += 1
            connection.count_unconfirmed(len(body))
        vhost.publish_many([(self, exchange, key, raw, body, True, number)])
        if number and self._durable is not None:
            self._tags[delivery.delivery_id] = delivery.tag
            if not route.by_properties and route.queues and not any(q.rejects or q.is_stream for q in route.queues):
                # Write the tag in the batch of the message. Not for streams, which are not in the batch, nor for a full
                # queue, which would refuse the message.
                links, container, name = self._durable
                vhost.write_rows(RowChange(links.tag_rows(container, name, [delivery.tag], ACCEPTED)))
        if not number:
            self.top_up()
        return None

    def _outcome(self, delivery: _Delivery, state: bytes) -> None:
        """Answer a delivery that was not published."""
        if not delivery.is_settled:
            self._confirm([delivery.delivery_id], state)
            self.session.connection.schedule_flush()
        self.top_up()

    def _route(self, message: Received) -> tuple[str, str]:
        """Return the exchange and the routing key of a message."""
        node = self.node
        if node is None:
            if message.to is None:
                raise LinkFault(INVALID_FIELD, "a message on a link without target address has no property 'to'")
            node = addresses.parse(message.to, self.vhost, is_topic=message.is_to_topic)
            self._require(node)
        if node.is_queue:
            if node.queue not in self.vhost.queues.by_name:
                raise LinkFault(NOT_FOUND, f"no queue '{node.queue:.200}' in vhost '{self.vhost.name}'")
            return "", node.queue
        key = node.key if node.key is not None else (message.subject or "")
        if len(key) > 255 >> 2 and len(key.encode()) > 255:
            raise LinkFault(INVALID_FIELD, "a routing key exceeds 255 bytes")
        if (node.exchange, key) not in self._checked:
            connection = self.session.connection
            connection.check_topic(node.exchange, "write", key)
            if len(self._checked) >= 64:
                self._checked.clear()
            self._checked.add((node.exchange, key))
        if node.exchange not in self.vhost.topology.exchanges:
            self.vhost.check_exchange(node.exchange)
        return node.exchange, key

    def _check_properties(self, raw: bytes) -> None:
        connection = self.session.connection
        try:
            seen = properties.peek(raw)
        except BasaltError as error:
            raise LinkFault(condition_of(error), str(error)) from None
        user = connection.user
        if seen.user_id is not None and seen.user_id != user.name.encode() and IMPERSONATOR not in user.tags:
            raise LinkFault(
                UNAUTHORIZED,
                f"user_id property set to '{seen.user_id.decode(errors='backslashreplace')}' "
                f"but authenticated user was '{user.name}'",
            )
        connection.usage.remember_checked(raw)

    def returned(self, exchange: str, routing_key: str, properties: bytes, body: bytes, number: int) -> None:
        """A message has no route: its outcome will be `released`."""
        if number and not self._pending[number][2]:
            self._released.add(number)

    def confirmed(self, numbers: Sequence[int], ok: bool) -> None:
        """Send the outcome of messages that are durable, or were refused."""
        pending = self._pending
        found = [pending.pop(number) for number in numbers]
        self.unconfirmed -= len(found)
        self.session.connection.count_unconfirmed(-sum([size for _, size, _ in found]))
        if self.is_ending or not self.session.is_open:
            return
        if ok and self._released:
            mine = self._released.intersection(numbers)
            if mine:
                self._released -= mine
                self._confirm(
                    [each[0] for number, each in zip(numbers, found, strict=True) if number in mine], _RELEASED
                )
                found = [each for number, each in zip(numbers, found, strict=True) if number not in mine]
        if found:
            self._confirm([delivery_id for delivery_id, _, _ in found], ACCEPTED if ok else _FULL)
        self.top_up()
        self.session.connection.flush_now()

    def _confirm(self, ids: list[int], state: bytes) -> None:
        is_settled = self.rcv_settle_mode == p.FIRST
        if not is_settled:
            self.unsettled.update(dict.fromkeys(ids))
        self.session.confirm(ids, state, is_settled=is_settled)

    def settled_by_sender(self, first: int, count: int) -> None:
        """The client has settled deliveries whose outcome it has received."""
        ids: Iterable[int] = [each for each in self.unsettled if (each - first) & _U32 < count]
        if count <= len(self.unsettled):
            ids = [each & _U32 for each in range(first, first + count) if each & _U32 in self.unsettled]
        for each in ids:
            del self.unsettled[each]
        if self._durable is not None:
            self._forget([self._tags.pop(each) for each in ids])
        self.top_up()

    def top_up(self) -> None:
        """Give the client credit again, as far as the queues of its messages allow."""
        room = CREDIT - self.unconfirmed - len(self.unsettled)
        missing = room - self._credit
        if missing < min(CREDIT >> 2, room) or missing <= 0 or self._is_waiting or self.is_ending:
            return
        limited = self._limited()
        if limited:
            missing = min(missing, *[queue.publish_credit for queue in limited])
            if missing < 1:
                self._is_waiting = True
                self.vhost.tick.wait_for_credit(limited, self._go_on)
                return
            for queue in limited:
                queue.publish_credit -= missing
        self._credit += missing
        self.session.link_flow(self.handle, delivery_count=self.received, link_credit=self._credit)

    def _limited(self) -> list[Any]:
        node = self.node
        if node is None or not self.vhost.is_up:
            return []
        key = node.queue or node.key
        return [] if key is None else self.vhost.tick.router.known_route(node.exchange, key).limited()

    def _go_on(self) -> None:
        self._is_waiting = False
        if self.session.is_open and not self.is_ending:
            self.top_up()

    def flow(self, fields: list[Any]) -> None:
        """Handle the client's flow: it may have skipped deliveries, or request the credit."""
        if fields[9]:
            self.session.link_flow(self.handle, delivery_count=self.received, link_credit=self._credit)

    def credit_for_commands(self, count: int) -> None:
        """Give credit to a control link of transactions."""
        self._credit = count
        self.session.link_flow(self.handle, delivery_count=self.received, link_credit=self._credit)

    def stop(self, *, is_closed: bool) -> None:
        if self._delivery is not None:
            self._count_bytes(-self._delivery.size)
            self._delivery = None
        self.session.connection.coordinator.link_ended(self)
        if self._durable is not None:
            links, container, name = self._durable
            if is_closed and not self.is_ending:
                links.delete_target(container, name)
        node, self.node = self.node, None
        if node is not None:
            nodes = self.session.connection.dynamic_nodes
            if self.is_dynamic:
                nodes.ended(node)
            else:
                nodes.left(node)


class _Saved:
    """Waits until a durable link and the messages of its unsettled map are stored."""

    __slots__ = ("_link", "_target", "_unsettled")

    def __init__(self, link: Receiver, target: p.Target, unsettled: list[bytes]) -> None:
        self._link = link
        self._target = target
        self._unsettled = unsettled

    def done(self) -> bool:
        return not self._link.session.is_open

    def set_result(self, result: None, /) -> None:
        self._link.saved(self._target, self._unsettled)

    def set_exception(self, error: BaseException, /) -> None:
        """Do nothing: the virtual host has failed and closes the connection."""
