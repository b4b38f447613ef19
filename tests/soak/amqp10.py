"""AMQP 1.0 clients of the default virtual host: a publisher and a consumer of Qpid Proton, and transactions.

Only Proton uses the queue `links`. Transactions publish to `tx.1` and `tx.2`, like those of AMQP 0-9-1.
"""

from __future__ import annotations

from typing import Any

from proton import Delivery, Message, ProtonException
from proton.utils import BlockingConnection
from tests.interop.amqp10.raw import raw_client
from tests.interop.amqp10.test_transactions import Transactions, under
from tests.soak import amqp
from tests.soak.clients import Client, Round
from tests.soak.ledger import CANCELLED, CONFIRMED, SETTLING, TRIED, Found, Label

from basaltmq.protocols.amqp10.wire import performatives as p

WAIT_S = 20.0
LOOK_S = 0.5
CREDIT = 20
PLACE = f"/|{amqp.LINKS}"
TX_QUEUES = ("tx.1", "tx.2")
TX_PLACES = tuple(f"/|{queue}" for queue in TX_QUEUES)
FIRST_HANDLE = 1


class _Amqp10(Client):
    expected = (OSError, ProtonException)

    def __init__(self, turn: Round, name: str) -> None:
        super().__init__(turn, f"amqp10-{name}")

    def connect(self) -> Any:
        login = {"user": "guest", "password": "guest", "allowed_mechs": "PLAIN", "timeout": WAIT_S}
        return BlockingConnection(f"127.0.0.1:{self.broker.port('amqp')}", **login)


class Publisher(_Amqp10):
    """Sends one message at a time. It is durable when the broker accepts it."""

    def session(self) -> None:
        connection = self.connect()
        try:
            sender = connection.create_sender(f"/queues/{amqp.LINKS}")
            while self.turn.pause(self.random.choice((0.0, 0.01, 0.05))):
                (label,) = self.ledger.next_label("l")
                self.ledger.mark((PLACE,), (label,), TRIED)
                body = label.body(self.random.choice((0, 300, 50_000)))
                delivery = sender.send(Message(body=body, inferred=True, durable=True))
                if delivery.remote_state == Delivery.ACCEPTED:
                    self.ledger.mark((PLACE,), (label,), CONFIRMED)
        finally:
            connection.close()


class Consumer(_Amqp10):
    """Accepts most messages and releases some."""

    def session(self) -> None:
        connection = self.connect()
        try:
            receiver = connection.create_receiver(f"/queues/{amqp.LINKS}", credit=CREDIT)
            while not self.turn.stopping.is_set():
                try:
                    message = receiver.receive(timeout=LOOK_S)
                except TimeoutError:
                    continue
                label = Label.of(bytes(message.body))
                self.ledger.seen(PLACE, label, self.name)
                if self.random.random() < 0.1:
                    receiver.release(delivered=False)
                else:
                    self.ledger.mark((PLACE,), (label,), SETTLING)
                    receiver.accept()
        finally:
            connection.close()


class Transactor(_Amqp10):
    """Commits most transactions and rolls some back."""

    # The raw client raises AssertionError when a connection ends.
    expected = (OSError, AssertionError)

    def session(self) -> None:
        with raw_client(self.broker.port("amqp")) as client:
            client.open()
            control = Transactions(client, first=1 << 30)
            for handle, queue in enumerate(TX_QUEUES, FIRST_HANDLE):
                client.attach_sender(handle, f"/queues/{queue}")
            number = 0
            while self.turn.pause(0.05):
                number = self._transaction(client, control, number)

    def _transaction(self, client: Any, control: Transactions, number: int) -> int:
        """Run a transaction. Return the next delivery number."""
        labels = self.ledger.next_label("l-tx", self.random.randrange(1, 10))
        self.ledger.mark(TX_PLACES, labels, TRIED)
        is_kept = self.random.random() < 0.8
        group = [Found(place, label) for label in labels for place in TX_PLACES]
        if is_kept:
            self.ledger.groups.append(group)
        else:
            self.ledger.mark(TX_PLACES, labels, CANCELLED)
        txn_id = control.declare()
        for label in labels:
            for handle in range(FIRST_HANDLE, FIRST_HANDLE + len(TX_QUEUES)):
                client.transfer(handle, number, label.body(100), settled=True, state=under(txn_id))
                number += 1
        answer = control.discharge(txn_id, fail=not is_kept)
        if is_kept and answer == p.Accepted():
            self.ledger.mark(TX_PLACES, labels, CONFIRMED)
            self.ledger.groups.remove(group)
        return number
