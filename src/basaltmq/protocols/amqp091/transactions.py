"""Channel transactions: publishes and settlements wait for tx.commit, which applies them as one store batch.

Deliveries settled in a transaction belong to the channel until the commit. A rollback makes them unsettled again. A
failed commit closes the channel and applies nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from basaltmq.broker.message.operations import Publish, Settlement
from basaltmq.errors import BasaltError
from basaltmq.protocols.amqp091 import consuming
from basaltmq.protocols.amqp091.confirms import Confirms
from basaltmq.protocols.amqp091.subscriptions import Subscription
from basaltmq.protocols.amqp091.unacked import Taken
from basaltmq.protocols.amqp091.wire import methods as m
from basaltmq.protocols.amqp091.wire.errors import (
    PRECONDITION_FAILED,
    RESOURCE_ERROR,
    ChannelFault,
    ConnectionFault,
    fault_of,
)

if TYPE_CHECKING:
    from basaltmq.protocols.amqp091.channel import Channel

TRANSACTION_BYTES_MAX: Final = 64 << 20
"""Limit of a transaction in bytes, because it is one batch in memory and in the store."""

TRANSACTION_COPIES_MAX: Final = 10_000
"""Limit of a transaction in messages, counted once per queue that gets them. They are one batch, which other clients
wait for: 10,000 take 60 to 70 ms. A message without a queue counts too, and so does a long match of properties."""


class Transaction:
    """Publishes and settlements that wait for tx.commit."""

    __slots__ = ("_bytes", "_copies", "acks", "publishes", "settled")

    def __init__(self) -> None:
        self.publishes: list[Publish] = []
        self.settled: list[tuple[list[Taken[Subscription]], str]] = []
        self.acks = 0
        self._bytes = self._copies = 0

    def publish(self, messages: list[Publish], copies: int) -> None:
        """Add messages. `copies` counts them once per queue."""
        self._copies += copies
        if self._copies > TRANSACTION_COPIES_MAX:
            raise ConnectionFault(
                RESOURCE_ERROR,
                f"the transaction enqueues more than {TRANSACTION_COPIES_MAX} messages, counted once per queue; "
                "commit after fewer messages",
                m.BasicPublish.number,
            )
        self._bytes += sum(len(message[3]) + len(message[4]) for message in messages)
        if self._bytes > TRANSACTION_BYTES_MAX:
            raise ConnectionFault(
                RESOURCE_ERROR,
                f"the transaction exceeds {TRANSACTION_BYTES_MAX} bytes; commit after fewer messages",
                m.BasicPublish.number,
            )
        self.publishes += messages

    def settle(self, taken: list[Taken[Subscription]], outcome: str) -> None:
        self.settled.append((taken, outcome))
        self.acks += len(taken)

    def taken(self) -> list[Taken[Subscription]]:
        """Return every delivery that the transaction settles."""
        return [each for taken, _ in self.settled for each in taken]

    def forget(self) -> None:
        self.publishes = []
        self.settled = []
        self.acks = self._bytes = self._copies = 0


def tx_select(channel: Channel, method: m.TxSelect) -> None:
    if channel.confirms is not None:
        raise ChannelFault(PRECONDITION_FAILED, "cannot switch from confirm to tx mode", method.number)
    if channel.transaction is None:
        channel.transaction = Transaction()
    channel.send(m.TxSelectOk())


def _of(channel: Channel, method: m.Method) -> Transaction:
    if channel.transaction is None:
        raise ChannelFault(PRECONDITION_FAILED, "channel is not transactional", method.number)
    return channel.transaction


def tx_commit(channel: Channel, method: m.TxCommit) -> None:
    transaction = _of(channel, method)
    settlements: list[Settlement] = []
    for taken, outcome in transaction.settled:
        settlements += consuming.settlements_of(taken, outcome)
    done = channel.vhost.commit_tx(transaction.publishes, settlements)
    taken = transaction.taken()
    transaction.forget()
    consuming.give_credit(channel, taken)

    def answer(finished: asyncio.Future[None]) -> None:
        if not channel.is_open or finished.cancelled():
            return
        error = finished.exception()
        if error is None:
            channel.send(m.TxCommitOk())
            channel.connection.schedule_flush()
        elif isinstance(error, BasaltError):
            channel.connection.refuse(channel.number, fault_of(error, method.number))
        else:
            channel.connection.fail(error)

    done.add_done_callback(answer)


def tx_rollback(channel: Channel, method: m.TxRollback) -> None:
    transaction = _of(channel, method)
    channel.unacked.put_back(transaction.taken())
    transaction.forget()
    channel.send(m.TxRollbackOk())


def confirm_select(channel: Channel, method: m.ConfirmSelect) -> None:
    if channel.transaction is not None:
        raise ChannelFault(PRECONDITION_FAILED, "cannot switch from tx to confirm mode", method.number)
    if channel.confirms is None:
        channel.confirms = Confirms(channel.number)
    if not method.nowait:
        channel.send(m.ConfirmSelectOk())


HANDLERS: Final[dict[type[m.Method], Any]] = {
    m.TxSelect: tx_select,
    m.TxCommit: tx_commit,
    m.TxRollback: tx_rollback,
    m.ConfirmSelect: confirm_select,
}
