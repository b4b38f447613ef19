"""A session: windows, delivery ids, and the links of one channel.

    incoming   next_incoming_id, incoming_window        transfers that the client may send
    outgoing   next_outgoing_id, remote_window          transfers that the client accepts

Every transfer frame takes one place of a window. Deliveries wait here while the window is closed, and the consumers of
the session's links are paused until the client opens it. Identifiers are 32-bit serial numbers.

A fault of a link detaches the link; the session and its other links continue.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from basaltmq.broker.message.operations import ACK, SETTLE_PORTIONS, SETTLE_S, RowChange, Settlement
from basaltmq.errors import BasaltError
from basaltmq.protocols.amqp10.link import Link
from basaltmq.protocols.amqp10.management import ADDRESS, RequestLink, ResponseLink
from basaltmq.protocols.amqp10.outcomes import Outcome, outcome_of
from basaltmq.protocols.amqp10.receiver import Receiver
from basaltmq.protocols.amqp10.sender import Parts, Sender
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire.errors import (
    ERRANT_LINK,
    HANDLE_IN_USE,
    INVALID_FIELD,
    NOT_ALLOWED,
    UNATTACHED_HANDLE,
    WINDOW_VIOLATION,
    Fault,
    LinkFault,
    SessionFault,
    condition_of,
)
from basaltmq.protocols.amqp10.wire.frames import encode_disposition, encode_transfer, frame, transfer_bytes
from basaltmq.protocols.amqp10.wire.types import Described

if TYPE_CHECKING:
    from basaltmq.protocols.amqp10.connection import Connection
    from basaltmq.protocols.amqp10.input import Wait

INCOMING_WINDOW: Final = 4096
"""Transfer frames that a client may send before it gets a flow."""

FRAMES_PER_TURN: Final = 256
PART_BYTES_PER_TURN: Final = 1 << 20
"""Limits for the parts of a large delivery that are written in one turn of the loop. A frame takes about 1 us."""

OUTGOING_WINDOW: Final = 0x7FFF_FFFF
U32: Final = 0xFFFF_FFFF

UNSETTLED_MAX: Final = 262_144
"""Unsettled deliveries of a session, above which its consumers are paused: 64 MiB of state."""

_log: Final = logging.getLogger(__name__)

AnyLink = TypeVar("AnyLink", bound=Link)
Unsettled = tuple[Sender, int, bytes]
"""Link, lease token, message id."""


class Session:
    """A session of a connection."""

    def __init__(self, connection: Connection, channel: int, begin: p.Begin) -> None:
        self.connection = connection
        self.vhost = connection.vhost
        self.channel = channel
        self.links: dict[int, Receiver | Sender | ResponseLink] = {}
        """Links by the client's handle, which we use too."""
        self.responses: list[ResponseLink] = []
        """Links for responses of the management node."""
        self.unsettled: dict[int, Sender] = {}
        """Links of the deliveries to the client that it has not settled, by delivery id."""
        self._accepted: dict[tuple[str, int], list[bytes]] = {}
        """Ids of deliveries that the input of this turn has accepted, by queue and lease token."""
        self.in_transaction = 0
        """Deliveries that open transactions will settle."""
        self.is_open = True
        self.remote_window = begin.incoming_window
        self.next_delivery_id = 0
        self.next_outgoing_id = 0
        """Number of the next transfer frame."""
        self._next_incoming_id = begin.next_outgoing_id
        self._incoming_window = INCOMING_WINDOW
        self._handle_max = begin.handle_max
        self._waiting: deque[tuple[Sender, Sequence[Any]]] = deque()
        """Deliveries that wait for the window."""
        self._parts: Parts | None = None
        """The rest of a delivery that waits for the window or the next turn."""
        self._is_due = False
        """The next turn sends what waits."""
        self._is_full = False
        answer = p.Begin(
            remote_channel=channel,
            next_outgoing_id=0,
            incoming_window=INCOMING_WINDOW,
            outgoing_window=OUTGOING_WINDOW,
            handle_max=connection.server.handle_max,
        )
        self.send(answer)

    def send(self, performative: p.Composite) -> None:
        self.connection.out.append(frame(self.channel, p.encode(performative)))
        self.connection.schedule_flush()

    def attach(self, attach: p.Attach) -> None:
        """Attach a link, or refuse it with an error."""
        handle = attach.handle
        if handle in self.links:
            raise SessionFault(HANDLE_IN_USE, f"handle {handle} is in use")
        if handle > self.connection.server.handle_max:
            raise Fault(NOT_ALLOWED, f"handle {handle} exceeds the limit of {self.connection.server.handle_max}")
        self.connection.usage.count_link()
        if attach.role == p.SENDER or attach.source is not None:
            # Without a source the client looks up a subscription, which may be in use.
            self.connection.server.containers.steal(self.connection, attach)
        link = self.links[handle] = self.connection.links[attach.name, attach.role] = self._make(attach)
        try:
            link.open()
        except BasaltError as error:
            link.refuse(LinkFault(condition_of(error), str(error)))
        except LinkFault as fault:
            link.refuse(fault)

    def _make(self, attach: p.Attach) -> Receiver | Sender | ResponseLink:
        if attach.role == p.SENDER:
            is_request = isinstance(attach.target, p.Target) and attach.target.address == ADDRESS
            return RequestLink(self, attach) if is_request else Receiver(self, attach)
        is_response = isinstance(attach.source, p.Source) and attach.source.address == ADDRESS
        return ResponseLink(self, attach) if is_response else Sender(self, attach)

    def find(self, kind: type[AnyLink], name: str) -> AnyLink | None:
        """Return the link of this kind and name."""
        return next((link for link in self.links.values() if isinstance(link, kind) and link.name == name), None)

    def link(self, handle: Any, what: str) -> Receiver | Sender | ResponseLink:
        found = self.links.get(handle)
        if found is None:
            raise SessionFault(UNATTACHED_HANDLE, f"{what} for handle {handle!r:.20}, which is not attached")
        return found

    def detach(self, detach: p.Detach) -> None:
        link = self.link(detach.handle, "detach")
        del self.links[detach.handle]
        self.connection.link_ended(link)
        link.detached(is_closed=bool(detach.closed))

    def transfer(self, fields: list[Any], raw: bytes, at: int, end: int) -> Wait | None:
        """Handle a transfer frame whose payload is `raw[at:end]`."""
        if self._incoming_window <= 0:
            raise SessionFault(WINDOW_VIOLATION, "the session's incoming window is exceeded")
        self._incoming_window -= 1
        self._next_incoming_id = (self._next_incoming_id + 1) & U32
        if self._incoming_window <= INCOMING_WINDOW >> 1:
            self._incoming_window = INCOMING_WINDOW
            self.send(self._flow())
        link = self.links.get(fields[0])
        if not isinstance(link, Receiver):
            if link is None:
                raise SessionFault(UNATTACHED_HANDLE, f"transfer for handle {fields[0]!r:.20}, which is not attached")
            raise SessionFault(ERRANT_LINK, f"transfer on link {link.name!r:.80}, on which the client receives")
        if link.is_ending:
            return None
        try:
            return link.transfer(fields, raw, at, end)
        except LinkFault as fault:
            link.end(fault)
        except BasaltError as error:
            link.end(LinkFault(condition_of(error), str(error)))
        return None

    def flow(self, fields: list[Any]) -> None:
        """Handle a flow frame: of the session, and of a link if it names one."""
        next_incoming_id, incoming_window = fields[0], fields[1]
        if not isinstance(incoming_window, int):
            raise Fault(INVALID_FIELD, "flow has no incoming-window, which is mandatory")
        # A client that has not received our begin omits the id. Our first id is 0.
        seen = next_incoming_id if isinstance(next_incoming_id, int) else 0
        ahead = (self.next_outgoing_id - seen) & U32
        self.remote_window = max(0, incoming_window - ahead) if ahead <= 0x7FFF_FFFF else 0
        self.go_on()
        self.update_full()
        for each in self.responses:
            each.send_waiting()
        if fields[4] is not None:
            link = self.link(fields[4], "flow")
            if not link.is_ending:
                try:
                    link.flow(fields)
                except LinkFault as fault:
                    link.end(fault)
        elif fields[9]:
            self.send(self._flow())

    def _flow(self) -> p.Flow:
        return p.Flow(
            next_incoming_id=self._next_incoming_id,
            incoming_window=self._incoming_window,
            next_outgoing_id=self.next_outgoing_id,
            outgoing_window=OUTGOING_WINDOW,
        )

    def link_flow(self, handle: int, **fields: Any) -> None:
        """Send a flow with the state of a link."""
        made = self._flow()
        made.handle = handle
        for name, value in fields.items():
            setattr(made, name, value)
        self.send(made)

    def deliver(self, link: Sender, deliveries: Sequence[Any]) -> None:
        """Send deliveries of a link as far as the window allows."""
        if self._waiting or self._parts is not None or not self.is_open:
            # A session that ends sends nothing more. Its links requeue the waiting deliveries.
            self._waiting.append((link, deliveries))
            return
        sent = link.write(deliveries)
        if sent < len(deliveries):
            self._waiting.append((link, deliveries[sent:]))
        self.update_full()
        self.connection.schedule_flush()

    def sent(self, frames: int) -> None:
        """Count transfer frames."""
        self.remote_window -= frames
        self.next_outgoing_id = (self.next_outgoing_id + frames) & U32

    def write_parts(self, parts: Parts) -> None:
        """Write a delivery in several frames, as far as the window and the turn allow."""
        connection = self.connection
        room = connection.frame_bytes_max - transfer_bytes(parts.tag)
        payload, at = parts.payload, parts.at
        size = len(payload)
        frames = min(self.remote_window, max(1, min(FRAMES_PER_TURN, PART_BYTES_PER_TURN // room)))
        for _ in range(frames):
            if at >= size:
                break
            part = payload[at : at + room]
            at += room
            flags = parts.is_settled + 2 * (at < size)
            encode_transfer(
                connection.out, self.channel, parts.link.handle, parts.delivery_id, parts.tag, len(part), flags
            )
            connection.out.append(part)
            self.sent(1)
        self._parts = parts._replace(at=at) if at < size else None
        if self._parts is not None and self.remote_window > 0:
            self._is_due = True
            connection.server.loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_due = False
        self.go_on()

    def go_on(self) -> None:
        """Send what waits, as far as the window and the client's reading allow."""
        if self._is_due or not (self._waiting or self._parts is not None):
            return
        if self.is_open and self.remote_window > 0 and not self.connection.is_full:
            self._send_waiting()
            self.update_full()

    def _send_waiting(self) -> None:
        """Send waiting parts and deliveries, while the window is open."""
        if self._parts is not None:
            self.write_parts(self._parts)
        while self._waiting and self._parts is None:
            link, deliveries = self._waiting.popleft()
            sent = link.write(deliveries)
            if sent < len(deliveries):
                self._waiting.appendleft((link, deliveries[sent:]))
                break
        self.connection.schedule_flush()

    @property
    def is_full(self) -> bool:
        """Whether consumers must pause."""
        return (
            bool(self._waiting)
            or self._parts is not None
            or self.remote_window <= 0
            or len(self.unsettled) >= UNSETTLED_MAX
        )

    @property
    def is_paused(self) -> bool:
        """Whether the consumers of the session's links are paused."""
        return self._is_full

    def update_full(self) -> None:
        """Pause or resume the consumers of the session's links."""
        is_full = self.is_full or self.connection.is_full
        if is_full != self._is_full:
            self._is_full = is_full
            for link in self.links.values():
                if isinstance(link, Sender):
                    link.pause(is_full)

    @property
    def has_parts(self) -> bool:
        """Whether a delivery is sent incompletely, so no other one may follow."""
        return self._parts is not None

    def waiting(self) -> Iterable[tuple[Sender, Sequence[Any]]]:
        return self._waiting

    def take_waiting(self, link: Sender) -> list[Any]:
        """Remove and return the deliveries of a link that wait for the window."""
        if self._parts is not None and self._parts.link is link:
            self._parts = None
        found = [each for owner, deliveries in self._waiting if owner is link for each in deliveries]
        if found:
            self._waiting = deque(each for each in self._waiting if each[0] is not link)
        return found

    def take_unsettled(self, link: Sender) -> list[tuple[int, int, bytes]]:
        """Remove the unsettled deliveries of a link. Return delivery ids, lease tokens and message ids."""
        found = [(delivery_id, *entry) for delivery_id, entry in link.unsettled.items()]
        link.unsettled = {}
        for each in found:
            del self.unsettled[each[0]]
        return found

    def take(self, delivery_id: int) -> Unsettled:
        """Remove an unsettled delivery."""
        link = self.unsettled.pop(delivery_id)
        return (link, *link.unsettled.pop(delivery_id))

    def put_back(self, delivery_id: int, entry: Unsettled) -> None:
        """Undo `take`, after a transaction was rolled back."""
        link, token, message_id = entry
        self.unsettled[delivery_id] = link
        link.unsettled[delivery_id] = (token, message_id)

    def accept(self, delivery_id: int) -> None:
        """Acknowledge a delivery with the others of this input."""
        link = self.unsettled.pop(delivery_id, None)
        if link is None:
            return
        token, message_id = link.unsettled.pop(delivery_id)
        link.settled += 1
        if token:
            # Copies have no lease.
            self._accepted.setdefault((link.queue, token), []).append(message_id)

    def settle_accepted(self) -> None:
        """Settle the deliveries that this input has accepted."""
        accepted, self._accepted = self._accepted, {}
        self.vhost.settle([Settlement(queue, token, ids, ACK) for (queue, token), ids in accepted.items()])
        if self._is_full:
            self.update_full()

    def disposition(self, fields: list[Any]) -> Iterator[tuple[float, bool]]:
        """Handle a disposition in portions. For each portion, yield its cost at the end of the turn, and whether more
        follow."""
        role, first, last, is_settled, state = fields[:5]
        if not isinstance(role, bool) or not isinstance(first, int) or isinstance(first, bool):
            raise Fault(INVALID_FIELD, "disposition has no role or no first delivery-id, which are mandatory")
        if last is None:
            last = first
        count = ((last - first) & U32) + 1 if isinstance(last, int) else 0
        if not 0 < count <= 0x8000_0000:
            raise Fault(INVALID_FIELD, "the last delivery-id of a disposition precedes the first")
        if isinstance(state, Described):
            state = p.of_described(state)
        if role == p.SENDER:
            self._settled_by_sender(first, count)
            yield 0.0, False
            return
        unsettled = self.unsettled
        if count == 1:
            ids = [first] if first in unsettled else []
        elif count <= len(unsettled):
            ids = [each & U32 for each in range(first, first + count) if each & U32 in unsettled]
        else:
            ids = [each for each in unsettled if (each - first) & U32 < count]
        outcome = self._outcome(ids, state, is_settled=bool(is_settled))
        if outcome is None:
            yield 0.0, False
            return
        size = SETTLE_PORTIONS[outcome.kind]
        for at in range(0, len(ids), size):
            portion = ids[at : at + size]
            if at:
                # Links may have ended since the portion before.
                portion = [each for each in portion if each in unsettled]
            if portion and self.is_open:
                self._settle(portion, state, outcome, is_settled=bool(is_settled))
            yield len(portion) * SETTLE_S[outcome.kind], at + size < len(ids)

    def _outcome(self, ids: list[int], state: object, *, is_settled: bool) -> Outcome | None:
        """Return the outcome of a disposition. None: it settles nothing, such as the state of an incomplete
        delivery."""
        if not ids:
            return None
        found = outcome_of(state.outcome if isinstance(state, p.TransactionalState) else state)
        if found is None and is_settled and not isinstance(state, p.TransactionalState):
            return self.unsettled[ids[0]].default_outcome
        return found

    def _settle(self, ids: list[int], state: object, outcome: Outcome, *, is_settled: bool) -> None:
        if isinstance(state, p.TransactionalState):
            self.connection.coordinator.settle(self, ids, state, outcome, is_settled=is_settled)
            return
        taken = [self.take(each) for each in ids]
        self.vhost.settle(settlements_of(taken, outcome))
        for link, _, _ in taken:
            link.settled += 1
        if not is_settled:
            self._answer_settled(ids, state)
        if self._is_full:
            self.update_full()

    def _answer_settled(self, ids: list[int], state: Any) -> None:
        """Settle deliveries of a link with receiver settle mode `second`, once the outcome is durable."""
        self.vhost.write_rows(RowChange((), _Settled(self, ids, p.encode(state))))

    def answer_outcome(self, ids: list[int], state: bytes) -> None:
        for first, last in ranges(ids):
            self.connection.out.append(
                encode_disposition(
                    self.channel, is_receiver=False, first=first, last=last, is_settled=True, state=state
                )
            )
        self.connection.schedule_flush()

    def _settled_by_sender(self, first: int, count: int) -> None:
        for link in self.links.values():
            if isinstance(link, Receiver) and link.unsettled:
                link.settled_by_sender(first, count)

    def confirm(self, ids: list[int], state: bytes, *, is_settled: bool) -> None:
        """Send the outcome of received deliveries."""
        out = self.connection.out
        for first, last in ranges(ids):
            out.append(
                encode_disposition(
                    self.channel, is_receiver=True, first=first, last=last, is_settled=is_settled, state=state
                )
            )

    def fail(self, fault: SessionFault) -> None:
        """End the session because of a fault. Frames that the client has sent before are ignored."""
        self.send(p.End(error=p.error_of(fault.condition, fault.text)))
        self.close()

    def close(self) -> None:
        """Stop handling and sending frames. The links still exist."""
        if self.is_open:
            self.is_open = False
            self.connection.coordinator.session_ended(self)

    def stopping(self) -> Iterator[None]:
        """End all links, one at a time, and requeue what the client has not settled."""
        self.close()
        while self.links:
            _, link = self.links.popitem()
            self.connection.link_ended(link)
            try:
                link.detached(is_closed=False)
            except BasaltError as error:
                _log.warning("%s: link %.80r: requeueing failed: %s", self.connection.name, link.name, error)
            yield
        self._waiting.clear()

    def info(self) -> dict[str, Any]:
        """Return the session's state for the management API, named as a channel."""
        links = list(self.links.values())
        senders = [link for link in links if isinstance(link, Sender)]
        return {
            "number": self.channel,
            "name": f"{self.connection.name} ({self.channel})",
            "user": self.connection.user.name,
            "vhost": self.vhost.name,
            "confirm": any(isinstance(link, Receiver) for link in links),
            "transactional": self.connection.coordinator.is_used(self),
            "prefetch_count": 0,
            "global_prefetch_count": 0,
            "consumer_count": len(senders),
            "messages_unacknowledged": len(self.unsettled),
            "messages_unconfirmed": sum(link.unconfirmed for link in links if isinstance(link, Receiver)),
            "acks_uncommitted": self.in_transaction,
            "messages_uncommitted": 0,
            "published": sum(link.received for link in links if isinstance(link, Receiver)),
            "delivered": sum(link.delivery_count for link in senders),
            "acknowledged": sum(link.settled for link in senders),
        }


class _Settled:
    """Waits until the outcome of deliveries is durable."""

    __slots__ = ("_ids", "_session", "_state")

    def __init__(self, session: Session, ids: list[int], state: bytes) -> None:
        self._session = session
        self._ids = ids
        self._state = state

    def done(self) -> bool:
        return not self._session.is_open

    def set_result(self, result: None, /) -> None:
        if self._session.is_open:
            self._session.answer_outcome(self._ids, self._state)

    def set_exception(self, error: BaseException, /) -> None:
        """Do nothing: the virtual host has failed and closes the connection."""


def ranges(ids: list[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive ids."""
    first = last = ids[0]
    if (ids[-1] - first) & U32 == len(ids) - 1:
        return [(first, ids[-1])]
    found = []
    for each in ids[1:]:
        if each != (last + 1) & U32:
            found.append((first, last))
            first = each
        last = each
    found.append((first, last))
    return found


def settlements_of(taken: Sequence[Unsettled], outcome: Outcome) -> list[Settlement]:
    """Return the settlements of deliveries, grouped by queue and lease, in order. Copies (token 0) have none."""
    groups: dict[tuple[str, int], list[bytes]] = {}
    for link, token, message_id in taken:
        if token:
            groups.setdefault((link.queue, token), []).append(message_id)
    return [Settlement(queue, token, ids, *outcome) for (queue, token), ids in groups.items()]
