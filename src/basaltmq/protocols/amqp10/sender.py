"""A link on which the client receives: a consumer of a queue.

    queue ─> consumer, with the credit of the link ─> session window ─> transfer frames

The delivery tag is the id of the message, or the offset of a stream's record. An exchange as source has a queue of its
own, bound with the routing key, that is deleted with the link.

Drain. A consumer cannot know that its queue has no message for it, because priorities and a single active consumer also
decide. So a drain ends when `DRAIN_TURNS` turns of the loop brought no delivery. The remaining credit is then given
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from basaltmq.broker.consumers.consumer import Consumer
from basaltmq.broker.consumers.selection import Selection
from basaltmq.broker.message.operations import ACK, REQUEUE, SETTLE_PORTIONS, Settlement
from basaltmq.broker.message.text_headers import envelope_of
from basaltmq.protocols.amqp10 import addresses, filters
from basaltmq.protocols.amqp10.addresses import Node
from basaltmq.protocols.amqp10.durable_links import DurableLinks, subscription_queue
from basaltmq.protocols.amqp10.link import Link
from basaltmq.protocols.amqp10.outcomes import RELEASED, Outcome, outcome_of
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire.errors import (
    INVALID_FIELD,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    RESOURCE_DELETED,
    RESOURCE_LOCKED,
    LinkFault,
)
from basaltmq.protocols.amqp10.wire.frames import encode_transfer, transfer_bytes
from basaltmq.protocols.amqp10.wire.types import Described
from basaltmq.queues.leases.delivery import Delivery

if TYPE_CHECKING:
    from basaltmq.protocols.amqp10.session import Session

DRAIN_TURNS: Final = 4

STREAM_CREDIT: Final = 1
"""Prefetch of a stream's consumer before the client gives credit. Zero would mean no limit."""

PRIORITY: Final = "rabbitmq:priority"
"""Link property: the consumer's priority."""

_OUTCOMES: Final = ["amqp:accepted:list", "amqp:rejected:list", "amqp:released:list", "amqp:modified:list"]
_U32: Final = 0xFFFF_FFFF


class Parts(NamedTuple):
    """The rest of a delivery that does not fit into one frame."""

    link: Sender
    delivery_id: int
    tag: bytes
    payload: bytes
    is_settled: bool
    at: int = 0
    """Position in the payload up to which it was sent."""


class Sender(Link):
    """A link on which the client receives."""

    __slots__ = (
        "_accepts",
        "_claimed",
        "_drained_at",
        "_durable",
        "_early_flow",
        "_idle_turns",
        "_is_draining",
        "_is_own",
        "_is_settled",
        "_is_shared",
        "_membership",
        "_node",
        "_terms",
        "consumer",
        "default_outcome",
        "delivery_count",
        "is_copy",
        "is_dynamic",
        "queue",
        "settled",
        "unsettled",
    )

    def __init__(self, session: Session, attach: p.Attach) -> None:
        super().__init__(session, attach)
        self.consumer: Consumer | None = None
        self.queue = ""
        self.delivery_count = 0
        self.settled = 0
        """Deliveries that the client has settled."""
        self.unsettled: dict[int, tuple[int, bytes]] = {}
        """Lease tokens and message ids of the deliveries that the client has not settled, by delivery id."""
        self.default_outcome = RELEASED
        self.is_dynamic = False
        self.is_copy = False
        """The client browses: messages stay in the queue."""
        self._is_own = False
        """The queue is that of a link or subscription to an exchange, with the permissions of the exchange."""
        self._accepts: Callable[[Any], bool] | None = None
        """The filter of a subscription. It drops the other messages, which are for nobody else."""
        self._node: Node | None = None
        """The queue that was created for this link, or that it names."""
        self._membership: tuple[DurableLinks, str, str] | None = None
        """Where the link is attached to a durable link or a shared subscription."""
        self._terms: tuple[Any, Any] | None = None
        """Address and filter of that subscription."""
        self._is_shared = False
        """Several links consume one subscription."""
        self._is_settled = attach.snd_settle_mode == p.SETTLED
        self._durable: tuple[DurableLinks, str, str] | None = None
        """The durable links of the virtual host, container and name, if this is one."""
        self._claimed: dict[bytes, Outcome] = {}
        """Outcomes of deliveries of an earlier link, by tag. They are settled when the queue delivers them again."""
        self._early_flow: list[Any] | None = None
        self._is_draining = False
        self._drained_at = 0
        self._idle_turns = 0

    def open(self) -> None:
        """Find the source, subscribe, and answer the attach."""
        attach = self.attach
        assert attach is not None
        source = p.expect(attach.source, p.Source)
        if source is None:
            self._look_up()
            return
        connection = self.session.connection
        if source.dynamic:
            self._node = connection.dynamic_nodes.create(connection, source.dynamic_node_properties)
            self.is_dynamic = True
            self.queue = self._node.queue
            address: str | None = addresses.address_of(self._node)
        else:
            address = source.address
            if address is None:
                raise LinkFault(INVALID_FIELD, "the source of the link has no address")
            node = addresses.parse(
                address, self.vhost, is_topic=not addresses.TOPICS.isdisjoint(source.capabilities or ())
            )
            if source.durable and source.expiry_policy == "never":
                self._make_durable(source)
            if node.is_queue:
                self.queue = node.queue
                self._node = node
                connection.dynamic_nodes.joined(node)
            else:
                self._bind(node, source)
        if not self._is_own and not self.is_dynamic:
            connection.check("read", self.queue)
        chosen = filters.filters_of(source.filter, connection.container_id)
        found = self.vhost.queues.get(self.queue, connection)
        # JMS clients request copies of topics. A subscription has copies anyway.
        self.is_copy = source.distribution_mode == "copy" and not self._is_own
        connection.has_no_local |= chosen.is_no_local
        selection = None
        if self._is_own:
            self._accepts = chosen.accepts
        elif chosen.accepts is not None or (self.is_copy and not found.is_stream):
            selection = Selection(chosen.accepts, is_copy=self.is_copy)
        properties = attach.properties or {}
        priority = properties.get(PRIORITY, 0)
        self.default_outcome = _default_outcome(source)
        self.consumer = self.vhost.subscribe(
            self.queue,
            self,
            tag=f"{connection.container_id}/{self.name}"[:255],
            no_ack=self._is_settled and not found.is_stream and not self.is_copy,
            exclusive=False,
            priority=priority if isinstance(priority, int) and not isinstance(priority, bool) else 0,
            prefetch=STREAM_CREDIT,
            arguments=chosen.arguments,
            owner=connection,
            selection=selection,
        )
        self.consumer.limit(0)
        self.session.update_full()
        if self.session.is_paused:
            self.consumer.pause()
        answered = p.Source(
            address=address,
            durable=p.NONE if self._durable is None else source.durable,
            expiry_policy=source.expiry_policy,
            timeout=source.timeout,
            dynamic=source.dynamic,
            dynamic_node_properties=source.dynamic_node_properties,
            distribution_mode=source.distribution_mode or "move",
            filter=chosen.accepted or None,
            default_outcome=source.default_outcome or p.Released(),
            outcomes=_OUTCOMES,
            capabilities=source.capabilities,
        )
        if self._durable is None:
            self.answer(source=answered, target=attach.target, initial_delivery_count=0)
            return
        self._take_over(attach.unsettled or {})
        links, container, name = self._durable
        links.save(container, name, answered, _Saved(self, answered, attach.target))

    def saved(self, source: p.Source, target: Any) -> None:
        """Answer the attach: the durable link is stored."""
        if self.attach is not None and not self.is_ending and self.session.is_open:
            self.answer(source=source, target=target, initial_delivery_count=0)
            early, self._early_flow = self._early_flow, None
            if early is not None:
                self.flow(early)

    def _look_up(self) -> None:
        """Attach to a durable subscription without source, to delete it by closing the link (JMS unsubscribe)."""
        assert self.attach is not None
        connection = self.session.connection
        links = connection.server.durable_links(self.vhost)
        capabilities = self.attach.desired_capabilities or ()
        container, name = _owner(self.name, connection.container_id, capabilities)
        source = links.find(container, name)
        if source is None:
            raise LinkFault(NOT_FOUND, f"container '{container:.80}' has no durable link '{name:.80}'")
        if links.attached(container, name):
            raise LinkFault(RESOURCE_LOCKED, f"the durable link '{name:.80}' is attached")
        connection.check("configure", subscription_queue(container, name))
        self._durable = (links, container, name)
        self.answer(source=source, target=self.attach.target, initial_delivery_count=0)

    def _make_durable(self, source: p.Source) -> None:
        """Find the durable link of this container and name, and take it from an earlier connection."""
        connection = self.session.connection
        links = connection.server.durable_links(self.vhost)
        container, name = _owner(self.name, connection.container_id, source.capabilities or ())
        self._join(links, container, name, source)
        stored = links.find(container, name)
        accepted = filters.filters_of(source.filter, connection.container_id).accepted or None
        if stored is not None and (stored.address, stored.filter) != (source.address, accepted):
            # Another subscription of the same name replaces it.
            connection.check("configure", subscription_queue(container, name))
            links.delete(container, name)
        self._durable = (links, container, name)

    def _join(self, links: DurableLinks, container: str, name: str, source: p.Source) -> None:
        """Attach to a durable link or a shared subscription. Its links must agree on address and filter."""
        accepted = filters.filters_of(source.filter, self.session.connection.container_id).accepted
        self._is_shared = "shared" in (source.capabilities or ())
        self._terms = (source.address, accepted)
        for other in links.attached(container, name):
            if not (self._is_shared and other._is_shared and other._terms == self._terms):
                raise LinkFault(
                    RESOURCE_LOCKED,
                    f"the subscription '{name:.80}' is in use, with another address or filter, or by one consumer only",
                )
        links.join(container, name, self)
        self._membership = (links, container, name)

    def _take_over(self, unsettled: dict[Any, Any]) -> None:
        """Take over the deliveries of an earlier link: settle those with an outcome in the client's unsettled map, and
        requeue the others."""
        assert self._durable is not None
        links, container, name = self._durable
        kept = links.resume(container, name)
        self._claimed = {}
        for tag, state in unsettled.items():
            outcome = outcome_of(p.of_described(state)) if isinstance(state, Described) else None
            if not isinstance(tag, bytes) or outcome is None:
                continue
            token = kept.pop(tag, None)
            if token is None:
                # Either the broker has settled it, or was restarted. In the second case the queue delivers it again.
                self._claimed[tag] = outcome
            else:
                self.vhost.settle([Settlement(self.queue, token, [tag], *outcome)])
        self._requeue([(token, tag) for tag, token in kept.items()])

    def _bind(self, node: Node, source: p.Source) -> None:
        """Create a queue for this link or subscription, and bind it to the exchange."""
        connection = self.session.connection
        self.vhost.topology.get(node.exchange)
        key = node.key or ""
        connection.check("read", node.exchange)
        connection.check_topic(node.exchange, "read", key)
        capabilities = source.capabilities or ()
        if self._durable is None and "shared" not in capabilities:
            self._node = connection.dynamic_nodes.create(connection, None)
            self.is_dynamic = True
            self.queue = self._node.queue
        else:
            container, name = _owner(self.name, connection.container_id, capabilities)
            is_durable = self._durable is not None
            if not is_durable:
                name = f"{name}|volatile"
                self._join(connection.server.durable_links(self.vhost), container, name, source)
            self.queue = subscription_queue(container, name)
            for kind in ("configure", "write", "read"):
                connection.check(kind, self.queue)
            self.vhost.declare_queue(self.queue, durable=is_durable, auto_delete=not is_durable)
        self._is_own = True
        self.vhost.bind_queue(self.queue, node.exchange, key, owner=connection)

    def flow(self, fields: list[Any]) -> None:
        """Set the credit of the link."""
        if self.attach is not None:
            self._early_flow = fields
            return
        if isinstance(fields[10], dict) and "txn-id" in fields[10]:
            raise LinkFault(NOT_IMPLEMENTED, "messages cannot be acquired in a transaction, only settled")
        given, credit, is_draining, echo = fields[5], fields[6], bool(fields[8]), fields[9]
        consumer = self.consumer
        if credit is not None and consumer is not None:
            if not isinstance(credit, int) or not (given is None or isinstance(given, int)):
                raise LinkFault(INVALID_FIELD, "delivery-count and link-credit of a flow must be integers")
            # A client that has not received our attach omits the delivery count, which is 0 then.
            room = ((given or 0) + credit - self.delivery_count) & _U32
            waiting = sum(len(deliveries) for link, deliveries in self.session.waiting() if link is self)
            room = room - waiting if room <= credit else 0
            self._is_draining = is_draining
            consumer.limit(max(0, room))
            if is_draining:
                self._drained_at = self.delivery_count
                self._idle_turns = 0
                self._check_drained()
                return
        if echo:
            self._say()

    def _say(self) -> None:
        consumer = self.consumer
        self.session.link_flow(
            self.handle,
            delivery_count=self.delivery_count,
            link_credit=0 if consumer is None else min(consumer.credit_left, _U32),
            available=0 if consumer is None else min(self.vhost.queues.ready(consumer.queue), _U32),
            drain=self._is_draining,
        )

    def _check_drained(self) -> None:
        """Give back the credit of a drain that no message uses."""
        consumer = self.consumer
        if consumer is None or not self._is_draining or not self.session.is_open or not self.vhost.is_up:
            return
        if self.delivery_count != self._drained_at:
            self._drained_at, self._idle_turns = self.delivery_count, 0
        self._idle_turns += 1
        if consumer.selection is not None and consumer.selection.is_behind:
            self._idle_turns = 0
        if consumer.credit_left > 0 and (self._idle_turns <= DRAIN_TURNS or consumer.paused):
            if consumer.paused:
                # The session window or the socket buffer is full. `pause` calls this function again.
                return
            self.session.connection.server.loop.call_soon(self._check_drained)
            return
        self._is_draining = False
        self.delivery_count = (self.delivery_count + consumer.credit_left) & _U32
        consumer.limit(0)
        self.session.link_flow(self.handle, delivery_count=self.delivery_count, link_credit=0, available=0, drain=True)

    def pause(self, is_paused: bool) -> None:
        """Stop or continue deliveries."""
        if self.consumer is None:
            return
        if is_paused:
            self.consumer.pause()
        else:
            self.consumer.resume()
            self._check_drained()

    def deliver(self, consumer: Consumer, deliveries: Sequence[Any]) -> None:
        """Send messages of the queue to the client."""
        if self._claimed:
            deliveries = self._settle_claimed(consumer, deliveries)
        if self._accepts is not None:
            deliveries = self._drop_others(consumer, self._accepts, deliveries)
        if not deliveries:
            return
        self.session.deliver(self, deliveries)

    def _settle_claimed(self, consumer: Consumer, deliveries: Sequence[Any]) -> list[Any]:
        """Settle the deliveries whose outcome is in the client's attach. Return the others."""
        others = []
        for each in deliveries:
            outcome = self._claimed.pop(each.id, None)
            if outcome is None:
                others.append(each)
            else:
                self.vhost.settle([Settlement(self.queue, each.token, [each.id], *outcome)])
                consumer.credit(1)
        return others

    def _drop_others(self, consumer: Consumer, accepts: Callable[[Any], bool], deliveries: Sequence[Any]) -> list[Any]:
        """Acknowledge the messages of a subscription that its filter does not accept. Return the others."""
        wanted = [each for each in deliveries if accepts(each)]
        if len(wanted) < len(deliveries):
            kept = {each.id for each in wanted}
            dropped = [each.id for each in deliveries if each.id not in kept]
            if not self._is_settled:
                self.vhost.settle([Settlement(self.queue, deliveries[0].token, dropped, ACK)])
            self._idle_turns = 0
            consumer.credit(len(dropped))
        return wanted

    def write(self, deliveries: Sequence[Any]) -> int:
        """Write deliveries as far as the session's window allows. Return their number."""
        session = self.session
        connection = session.connection
        out, encode, channel, handle = connection.out, connection.outgoing.encode, session.channel, self.handle
        is_settled = self._is_settled
        frame_bytes_max = connection.frame_bytes_max
        delivery_id, window = session.next_delivery_id, session.remote_window
        links, unsettled = session.unsettled, self.unsettled
        sent = 0
        for each in deliveries:
            if window <= 0:
                break
            envelope, body = each.content()
            tag = each.id
            attempts = 0
            if type(each) is Delivery:
                if not envelope:
                    envelope = envelope_of(each.headers)
                if each.redelivered:
                    attempts = each.attempts or 1
            payload = encode(envelope, body, each.redelivered, attempts)
            size = len(payload)
            if transfer_bytes(tag) + size <= frame_bytes_max:
                encode_transfer(out, channel, handle, delivery_id, tag, size, is_settled)
                out.append(payload)
                window -= 1
            else:
                session.sent(session.remote_window - window)
                session.write_parts(Parts(self, delivery_id, tag, payload, is_settled))
                window = session.remote_window
            if not is_settled:
                links[delivery_id] = self
                unsettled[delivery_id] = (each.token, tag)
            delivery_id = (delivery_id + 1) & _U32
            sent += 1
            if size > frame_bytes_max and session.has_parts:
                break
        session.next_delivery_id = delivery_id
        session.sent(session.remote_window - window)
        self.delivery_count = (self.delivery_count + sent) & _U32
        connection.delivered += sent
        return sent

    def cancelled(self, consumer: Consumer) -> None:
        """End the link, because the queue was deleted."""
        self.consumer = None
        if self.session.is_open and not self.is_ending:
            self.end(LinkFault(RESOURCE_DELETED, f"queue '{self.queue}' was deleted"))

    def stop(self, *, is_closed: bool) -> None:
        """Cancel the consumer, and requeue what the client has not settled."""
        consumer, self.consumer = self.consumer, None
        if consumer is not None:
            consumer.cancel()
        waiting = self.session.take_waiting(self)
        taken = self.session.take_unsettled(self)
        if self.vhost.is_up:
            # Deliveries to a link with settled deliveries were acknowledged when they were leased.
            entries = [(token, message_id) for _, token, message_id in taken if token]
            if self._keeps(is_closed=is_closed):
                assert self._durable is not None
                self._durable[0].suspend(*self._durable[1:], self.queue, {tag: token for token, tag in entries})
                entries = []
            if not self._is_settled:
                entries += [(each.token, each.id) for each in waiting if each.token]
            self._requeue(entries)
        self._leave()
        node, self._node = self._node, None
        if node is not None:
            nodes = self.session.connection.dynamic_nodes
            if self.is_dynamic:
                nodes.ended(node)
            else:
                nodes.left(node)

    def _leave(self) -> None:
        if self._membership is not None:
            links, container, name = self._membership
            links.leave(container, name, self)

    def _keeps(self, *, is_closed: bool) -> bool:
        """End a durable link: delete it if the client has closed it. Return whether its deliveries are kept."""
        if self._durable is None:
            return False
        links, container, name = self._durable
        self._leave()
        if is_closed and not self.is_ending:
            if not links.attached(container, name):
                links.delete(container, name)
            return False
        # Other consumers of a shared subscription get what this one has not settled.
        return (self.is_stolen or not self.is_ending) and not (self._is_settled or self._is_shared)

    def _requeue(self, entries: list[tuple[int, bytes]]) -> None:
        size = SETTLE_PORTIONS[REQUEUE]

        def portions() -> Any:
            for at in range(0, len(entries), size):
                groups: dict[int, list[bytes]] = {}
                for token, message_id in entries[at : at + size]:
                    groups.setdefault(token, []).append(message_id)
                yield [Settlement(self.queue, token, ids, REQUEUE) for token, ids in groups.items()]

        if len(entries) > size:
            self.vhost.settle_in_portions(portions())
        elif entries:
            self.vhost.settle(next(portions()))


class _Saved:
    """Waits until a durable link is stored."""

    __slots__ = ("_link", "_source", "_target")

    def __init__(self, link: Sender, source: p.Source, target: Any) -> None:
        self._link = link
        self._source = source
        self._target = target

    def done(self) -> bool:
        return not self._link.session.is_open

    def set_result(self, result: None, /) -> None:
        self._link.saved(self._source, self._target)

    def set_exception(self, error: BaseException, /) -> None:
        """Do nothing: the virtual host has failed and closes the connection."""


def _owner(name: str, container: str, capabilities: Iterable[str]) -> tuple[str, str]:
    """Return container and name of a durable link. Links of a shared subscription have the name before a `|`."""
    if "shared" not in capabilities:
        return container, name
    return "" if "global" in capabilities else container, name.split("|")[0]


def _default_outcome(source: p.Source) -> Outcome:
    """Return the outcome of a delivery that the client settles without one."""
    return outcome_of(source.default_outcome) or RELEASED
