"""Transactions of a connection: control links to the coordinator, and the operations of a transaction.

    declare    ─> declared, with the id of the transaction
    transfer   with a transactional state: the message is published by the discharge
    disposition with a transactional state: the delivery is settled by the discharge
    discharge  ─> accepted, after all of it was written as one batch and synced; or everything is rolled back

A transaction belongs to its control link. If the link ends before the discharge, the transaction is rolled back.
Deliveries that the client has settled are then requeued; the others stay unsettled at the client.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from basaltmq.broker.message.operations import Publish
from basaltmq.errors import BasaltError
from basaltmq.protocols.amqp10.outcomes import RELEASED, Outcome
from basaltmq.protocols.amqp10.receiver import Receiver
from basaltmq.protocols.amqp10.sender import Sender
from basaltmq.protocols.amqp10.session import Session, settlements_of
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import sections
from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.protocols.amqp10.wire.errors import (
    DECODE_ERROR,
    RESOURCE_LIMIT,
    TRANSACTION_ROLLBACK,
    UNKNOWN_TRANSACTION,
    Fault,
    LinkFault,
    SessionFault,
)
from basaltmq.protocols.amqp10.wire.frames import ACCEPTED

if TYPE_CHECKING:
    from basaltmq.broker.publishing.router import Route
    from basaltmq.protocols.amqp10.connection import Connection

CONTROL_CREDIT: Final = 64
TRANSACTIONS_MAX: Final = 64
"""Open transactions of a connection."""

TRANSACTION_BYTES_MAX: Final = 64 << 20
TRANSACTION_COPIES_MAX: Final = 10_000
"""Limits of a transaction, because it is one batch: bytes, and messages counted once per queue that gets them.

A message without a queue counts too."""

CAPABILITIES: Final = ["amqp:local-transactions", "amqp:multi-txns-per-ssn", "amqp:multi-ssns-per-txn"]


class Transaction:
    """The publishes and settlements of a transaction."""

    __slots__ = ("copies", "failure", "link", "publishes", "settled", "size")

    def __init__(self, link: Receiver) -> None:
        self.link = link
        self.publishes: list[Publish] = []
        self.settled: list[tuple[Session, int, tuple[Sender, int, bytes], Outcome, bytes, bool]] = []
        """Session, delivery id, delivery, outcome, encoded outcome, and whether the client has settled it."""
        self.size = self.copies = 0
        self.failure = ""
        """Why the transaction can only be rolled back."""


class Coordinator:
    """The transactions of a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._controls: set[Receiver] = set()
        self._open: dict[bytes, Transaction] = {}
        self._last = 0

    def open(self, link: Receiver) -> None:
        """Attach a control link."""
        attach = link.attach
        assert attach is not None
        link.answer(source=attach.source, target=p.Coordinator(capabilities=CAPABILITIES))
        self._controls.add(link)
        link.credit_for_commands(CONTROL_CREDIT)

    def is_control(self, link: Receiver) -> bool:
        return link in self._controls

    def is_used(self, session: Session) -> bool:
        """Whether a control link belongs to the session."""
        return any(link.session is session for link in self._controls)

    def command(self, link: Receiver, delivery_id: int, payload: bytes) -> None:
        """Handle declare or discharge."""
        command = _decode(payload)
        link.credit_for_commands(CONTROL_CREDIT)
        if isinstance(command, p.Declare):
            if len(self._open) >= TRANSACTIONS_MAX:
                self._reject(
                    link, delivery_id, RESOURCE_LIMIT, f"the limit of {TRANSACTIONS_MAX} transactions is reached"
                )
                return
            self._last += 1
            txn_id = self._last.to_bytes(8, "big")
            self._open[txn_id] = Transaction(link)
            link.session.confirm([delivery_id], p.encode(p.Declared(txn_id=txn_id)), is_settled=True)
            return
        transaction = self._open.pop(command.txn_id, None)
        if transaction is None:
            self._reject(link, delivery_id, UNKNOWN_TRANSACTION, "the transaction is not open on this connection")
        elif command.fail:
            self._roll_back(transaction)
            link.session.confirm([delivery_id], ACCEPTED, is_settled=True)
        elif transaction.failure:
            self._roll_back(transaction)
            self._reject(link, delivery_id, TRANSACTION_ROLLBACK, transaction.failure)
        else:
            self._commit(link, delivery_id, transaction)

    def _reject(self, link: Receiver, delivery_id: int, condition: str, text: str) -> None:
        state = p.encode(p.Rejected(error=p.error_of(condition, text)))
        if link.session.is_open:
            link.session.confirm([delivery_id], state, is_settled=True)
            self._connection.schedule_flush()

    def _commit(self, link: Receiver, delivery_id: int, transaction: Transaction) -> None:
        groups: dict[tuple[str, int], tuple[Outcome, list[Any]]] = {}
        for _, _, entry, outcome, _, _ in transaction.settled:
            groups.setdefault((outcome.kind, id(outcome.edit)), (outcome, []))[1].append(entry)
        settlements = [each for outcome, taken in groups.values() for each in settlements_of(taken, outcome)]
        try:
            done = self._connection.vhost.commit_tx(transaction.publishes, settlements)
        except BasaltError as error:
            self._roll_back(transaction)
            self._reject(link, delivery_id, TRANSACTION_ROLLBACK, str(error))
            return
        for session, _, entry, _, _, _ in transaction.settled:
            entry[0].settled += 1
            session.in_transaction -= 1
        done.add_done_callback(partial(self._committed, link, delivery_id, transaction))

    def _committed(
        self, link: Receiver, delivery_id: int, transaction: Transaction, done: asyncio.Future[None]
    ) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            self._reject(link, delivery_id, TRANSACTION_ROLLBACK, str(error))
            return
        for session, settled_id, _, _, state, is_settled in transaction.settled:
            if not is_settled and session.is_open:
                session.answer_outcome([settled_id], state)
        if link.session.is_open:
            link.session.confirm([delivery_id], ACCEPTED, is_settled=True)
            self._connection.schedule_flush()

    def _roll_back(self, transaction: Transaction) -> None:
        requeued = []
        for session, delivery_id, entry, _, _, is_settled in transaction.settled:
            session.in_transaction -= 1
            if session.is_open and not is_settled and entry[0].consumer is not None:
                session.put_back(delivery_id, entry)
            else:
                requeued.append(entry)
        if requeued and self._connection.vhost.is_up:
            self._connection.vhost.settle(settlements_of(requeued, RELEASED))
        transaction.settled = []
        transaction.publishes = []

    def _find(self, txn_id: bytes) -> Transaction | None:
        return self._open.get(txn_id)

    def publish(self, state: p.TransactionalState, message: Publish, route: Route, *, is_routed: bool) -> None:
        """Publish a message when the transaction is discharged."""
        transaction = self._find(state.txn_id)
        if transaction is None:
            raise LinkFault(UNKNOWN_TRANSACTION, "the transaction of a message is not open on this connection")
        if not is_routed:
            transaction.failure = "a message of the transaction has no route"
        transaction.copies += route.copies
        transaction.size += len(message[3]) + len(message[4])
        if transaction.copies > TRANSACTION_COPIES_MAX or transaction.size > TRANSACTION_BYTES_MAX:
            transaction.failure = (
                f"the transaction exceeds {TRANSACTION_COPIES_MAX} messages, counted once per queue, "
                f"or {TRANSACTION_BYTES_MAX} bytes"
            )
            transaction.publishes = []
            return
        transaction.publishes.append(message)

    def settle(
        self, session: Session, ids: list[int], state: p.TransactionalState, outcome: Outcome, *, is_settled: bool
    ) -> None:
        """Settle deliveries when the transaction is discharged."""
        transaction = self._find(state.txn_id)
        if transaction is None:
            raise SessionFault(UNKNOWN_TRANSACTION, "the transaction of a disposition is not open on this connection")
        encoded = p.encode(state.outcome)
        for delivery_id in ids:
            entry = session.take(delivery_id)
            session.in_transaction += 1
            transaction.settled.append((session, delivery_id, entry, outcome, encoded, is_settled))

    def link_ended(self, link: Receiver) -> None:
        """Roll back the transactions of a control link."""
        if link not in self._controls:
            return
        self._controls.discard(link)
        for txn_id, transaction in list(self._open.items()):
            if transaction.link is link:
                del self._open[txn_id]
                self._roll_back(transaction)

    def session_ended(self, session: Session) -> None:
        """Fail the transactions that would settle deliveries of a session that ends."""
        for transaction in self._open.values():
            if any(each[0] is session for each in transaction.settled):
                transaction.failure = "a session of the transaction has ended"


def _decode(payload: bytes) -> p.Declare | p.Discharge:
    try:
        for kind, _, at, end in sections.walk(payload, 0, len(payload)):
            if kind == sections.VALUE:
                value = t.decode(payload, at, end)[0]
                found = p.of_described(value) if isinstance(value, t.Described) else None
                if isinstance(found, p.Declare | p.Discharge):
                    return found
    except Fault as fault:
        raise LinkFault(fault.condition, fault.text) from None
    raise LinkFault(DECODE_ERROR, "a message to the coordinator must be a declare or a discharge")
