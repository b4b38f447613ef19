"""Transactions: declare, publish and settle under them, discharge; and what remains of them when something fails."""

from __future__ import annotations

import pytest
from tests.interop.amqp10.raw import RawClient, raw_client
from tests.interop.amqp10.test_protocol import declare, depth, fill, receive
from tests.interop.server import Broker

from basaltmq.protocols.amqp10.coordinator import TRANSACTION_COPIES_MAX
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import sections as s

CONTROL = 7


class Transactions:
    """The control link of a client."""

    def __init__(self, client: RawClient, first: int = 1000) -> None:
        self.client = client
        self.next_id = first
        answer = client.attach_sender(CONTROL, None, target=p.Coordinator())
        assert isinstance(answer.target, p.Coordinator)
        client.take(p.Flow)

    def command(self, command: p.Composite) -> object:
        number, self.next_id = self.next_id, self.next_id + 1
        self.client.transfer(CONTROL, number, payload=s.section(s.VALUE, p.encode(command)))
        while True:
            found = self.client.take(p.Disposition)
            if found.role == p.RECEIVER and found.first == number:
                return found.state

    def declare(self) -> bytes:
        declared = self.command(p.Declare())
        assert isinstance(declared, p.Declared)
        return declared.txn_id

    def discharge(self, txn_id: bytes, *, fail: bool = False) -> object:
        return self.command(p.Discharge(txn_id=txn_id, fail=fail))


def under(txn_id: bytes, outcome: p.Composite | None = None) -> p.TransactionalState:
    return p.TransactionalState(txn_id=txn_id, outcome=outcome)


@pytest.mark.spec("G2", "A5")
def test_a_discharge_publishes_and_settles_at_once(broker: Broker) -> None:
    source, target = declare(broker, "t-source"), declare(broker, "t-target")
    with raw_client(broker.port()) as client:
        client.open()
        fill(client, source, 2)
        transactions = Transactions(client)
        client.attach_sender(1, target)
        client.attach_receiver(2, source)
        client.credit(2, 2)
        receive(client, 2)
        txn_id = transactions.declare()
        client.transfer(1, 50, b"done", state=under(txn_id))
        found = client.take(p.Disposition)
        assert found.state == under(txn_id, p.Accepted())
        client.send(p.Disposition(role=True, first=0, last=1, settled=True, state=under(txn_id, p.Accepted())))
        assert (depth(broker, "t-target"), depth(broker, "t-source")) == (0, 2)
        assert transactions.discharge(txn_id) == p.Accepted()
        assert (depth(broker, "t-target"), depth(broker, "t-source")) == (1, 0)
        refused = transactions.discharge(txn_id)
        assert isinstance(refused, p.Rejected)
        assert refused.error.condition == "amqp:transaction:unknown-id"


@pytest.mark.spec("G2", "A5")
def test_a_rollback_undoes_both(broker: Broker) -> None:
    source, target = declare(broker, "t-rb-source"), declare(broker, "t-rb-target")
    with raw_client(broker.port()) as client:
        client.open()
        fill(client, source, 2)
        transactions = Transactions(client)
        client.attach_sender(1, target)
        client.attach_receiver(2, source)
        client.credit(2, 2)
        receive(client, 2)
        txn_id = transactions.declare()
        client.transfer(1, 50, b"undone", settled=True, state=under(txn_id))
        client.send(p.Disposition(role=True, first=0, settled=False, state=under(txn_id, p.Accepted())))
        client.send(p.Disposition(role=True, first=1, settled=True, state=under(txn_id, p.Accepted())))
        assert transactions.discharge(txn_id, fail=True) == p.Accepted()
        client.credit(2, 1, delivery_count=2)
        ((again, _),) = receive(client, 1)  # the one that the client has settled
        assert again.delivery_id == 2
        client.send(p.Disposition(role=True, first=0, last=2, settled=True, state=p.Accepted()))
        client.is_alive()
    assert (depth(broker, "t-rb-target"), depth(broker, "t-rb-source")) == (0, 0)


@pytest.mark.spec("G2", "A5")
@pytest.mark.parametrize("ending", ["detach", "end", "lost"])
def test_an_interrupted_transaction_is_rolled_back(broker: Broker, ending: str) -> None:
    source, target = declare(broker, f"t-{ending}-source"), declare(broker, f"t-{ending}-target")
    with raw_client(broker.port()) as client:
        client.open()
        fill(client, source, 1)
        transactions = Transactions(client)
        client.attach_sender(1, target)
        client.attach_receiver(2, source)
        client.credit(2, 1)
        receive(client, 1)
        txn_id = transactions.declare()
        client.transfer(1, 50, b"undone", state=under(txn_id))
        client.take(p.Disposition)
        client.send(p.Disposition(role=True, first=0, settled=True, state=under(txn_id, p.Accepted())))
        if ending == "detach":
            client.send(p.Detach(handle=CONTROL, closed=True))
            client.take(p.Detach)
        elif ending == "end":
            client.send(p.End())
            client.take(p.End)
    with raw_client(broker.port()) as other:
        other.open()
        other.attach_receiver(2, source)
        other.credit(2, 1)
        assert receive(other, 1)[0][1].endswith(b"m0")
    assert depth(broker, f"t-{ending}-target") == 0


@pytest.mark.spec("G2", "A5")
def test_a_transaction_that_cannot_be_applied_applies_nothing(broker: Broker) -> None:
    target = declare(broker, "t-nothing")
    with raw_client(broker.port()) as client:
        client.open()
        transactions = Transactions(client)
        client.attach_sender(1, target)
        client.attach_sender(2, "/exchanges/amq.direct/nobody")
        txn_id = transactions.declare()
        client.transfer(1, 50, b"not stored", settled=True, state=under(txn_id))
        client.transfer(2, 51, b"no route", settled=True, state=under(txn_id))
        refused = transactions.discharge(txn_id)
        assert isinstance(refused, p.Rejected)
        assert refused.error.condition == "amqp:transaction:rollback"
        client.transfer(1, 52, b"x", settled=True, state=under(b"nope"))
        assert client.error(p.Detach) == "amqp:transaction:unknown-id"
    assert depth(broker, "t-nothing") == 0


@pytest.mark.spec("G2", "A5")
@pytest.mark.promise("P8")
def test_messages_without_a_queue_count_for_the_limit_of_a_transaction(broker: Broker) -> None:
    with raw_client(broker.port()) as client:
        client.open()
        transactions = Transactions(client)
        client.attach_sender(1, "/exchanges/amq.topic/nobody")
        txn_id = transactions.declare()
        for number in range(TRANSACTION_COPIES_MAX + 1):
            client.transfer(1, 2000 + number, b"", settled=True, state=under(txn_id))
        refused = transactions.discharge(txn_id)
        assert isinstance(refused, p.Rejected)
        assert f"exceeds {TRANSACTION_COPIES_MAX} messages" in refused.error.description
