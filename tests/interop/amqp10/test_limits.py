"""Limits of AMQP 1.0: silent, greedy and hostile clients, client certificates, and crashes amid transactions."""

from __future__ import annotations

from pathlib import Path

import pytest
from proton import SSLDomain
from proton.utils import BlockingConnection
from tests.interop.amqp10.raw import RawClient, raw_client
from tests.interop.amqp10.test_durable_links import opened
from tests.interop.amqp10.test_protocol import declare, depth, fill, receive
from tests.interop.amqp10.test_transactions import Transactions, under
from tests.interop.server import Broker, running

from basaltmq.protocols.amqp10.wire import frames as f
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire import sections as s

FILES = Path(__file__).parents[2] / "fixtures" / "tls"


@pytest.mark.spec("G2")
def test_a_client_certificate_identifies_its_user(tmp_path: Path) -> None:
    flags = [
        "--amqps-enabled=true",
        "--amqps-port=0",
        f"--tls-certificate={FILES / 'server.pem'}",
        f"--tls-key={FILES / 'server.key'}",
        f"--tls-authority={FILES / 'authority.pem'}",
        "--tls-clients=ask",
    ]
    with running(tmp_path / "data", *flags) as broker:
        broker.call("PUT", "/api/users/alice", {"password": "unused", "tags": ""})
        broker.call("PUT", "/api/permissions/%2F/alice", {"configure": ".*", "write": ".*", "read": ".*"})
        domain = SSLDomain(SSLDomain.MODE_CLIENT)
        domain.set_credentials(str(FILES / "client.pem"), str(FILES / "client.key"), None)
        domain.set_trusted_ca_db(str(FILES / "authority.pem"))
        url = f"amqps://localhost:{broker.port('amqps')}"
        connection = BlockingConnection(url, timeout=60, ssl_domain=domain, allowed_mechs="EXTERNAL")
        (seen,) = broker.call("GET", "/api/connections")
        assert (seen["user"], seen["auth_mechanism"], seen["ssl"]) == ("alice", "EXTERNAL", True)
        connection.close()


@pytest.mark.spec("G2")
def test_a_silent_client_is_closed_and_one_that_sends_empty_frames_is_not(tmp_path: Path) -> None:
    with (
        running(tmp_path / "data", "--limits-heartbeat-s=8") as broker,
        raw_client(broker.port()) as silent,
        raw_client(broker.port()) as alive,
    ):
        silent.login()
        silent.send(p.Open(container_id="silent"))
        assert silent.take(p.Open).idle_time_out == 4000
        alive.open()
        alive.sock.settimeout(0.3)
        silent.sock.settimeout(0.05)
        for _ in range(400):
            alive.sock.sendall(f.EMPTY_FRAME)
            try:
                assert silent.error(p.Close) == "amqp:resource-limit-exceeded"
                break
            except TimeoutError:
                pass
            with pytest.raises(TimeoutError):
                alive.next()
        else:
            raise AssertionError("the silent client was not closed")
        alive.sock.settimeout(30)
        alive.is_alive()


@pytest.mark.spec("G2")
def test_endless_and_oversized_transfers_end_their_link(tmp_path: Path) -> None:
    with running(tmp_path / "data", "--limits-message-bytes-max=1048576") as broker:
        address = declare(broker, "l-endless")
        with raw_client(broker.port()) as client:
            client.open()
            answer = client.attach_sender(0, address)
            assert answer.max_message_size == 1_048_576
            client.take(p.Flow)
            whole = s.data_head(4 << 20) + bytes(4 << 20)
            for at in range(0, len(whole), 65_536):
                client.transfer(0, 0, payload=whole[at : at + 65_536], more=True)
            assert client.error(p.Detach) == "amqp:link:message-size-exceeded"
            client.send(p.Detach(handle=0, closed=True))
            client.attach_sender(1, address)
            client.take(p.Flow)
            # Frames without payload take no memory, and count for the window of the session.
            for _ in range(20_000):
                client.transfer(1, 1, payload=b"", more=True)
            client.transfer(1, 1, b"end")
            assert client.take(p.Disposition).state == p.Accepted()
        assert depth(broker, "l-endless") == 1


@pytest.mark.spec("G2")
def test_a_client_that_never_reads_blocks_nobody(broker: Broker) -> None:
    address = declare(broker, "l-deaf")
    with raw_client(broker.port()) as client:
        client.open(max_frame_size=131_072)
        client.attach_sender(0, address)
        client.take(p.Flow)
        for number in range(64):
            for last in (False, True):
                payload = (b"" if last else s.data_head(200_000)) + bytes(100_000)
                client.transfer(0, number, payload=payload, more=not last)
        confirmed = 0
        while confirmed < 64:
            found = client.take(p.Disposition)
            confirmed += (found.last if found.last is not None else found.first) - found.first + 1
    deaf = opened(broker, "deaf")
    deaf.attach_receiver(1, address)
    deaf.credit(1, 1000, incoming_window=1 << 30)
    for _ in range(2000):
        deaf.send(p.Flow(incoming_window=1 << 30, outgoing_window=0, next_incoming_id=0, echo=True))
    with raw_client(broker.port()) as client:
        client.open()
        fill(client, declare(broker, "l-others"), 100)
    deaf.sock.close()
    with raw_client(broker.port()) as client:
        client.open()
        client.attach_receiver(1, address)
        client.credit(1, 1000, incoming_window=1 << 30)
        whole = 0
        while whole < 64:
            whole += not client.take(p.Transfer).more


@pytest.mark.spec("G2", "A5")
@pytest.mark.parametrize("is_discharged", [False, True], ids=["open", "discharged"])
def test_a_crash_amid_a_transaction_over_several_links(own_broker: Broker, is_discharged: bool) -> None:
    broker = own_broker
    source, one, two = declare(broker, "l-source"), declare(broker, "l-one"), declare(broker, "l-two")
    client = RawClient(broker.port()).open()
    fill(client, source, 2)
    transactions = Transactions(client)
    client.attach_sender(1, one)
    client.attach_sender(2, two)
    client.attach_receiver(3, source)
    client.credit(3, 2)
    receive(client, 2)
    txn_id = transactions.declare()
    for number, handle in enumerate((1, 2, 1, 2)):
        client.transfer(handle, 50 + number, b"%d" % number, settled=True, state=under(txn_id))
    client.send(p.Disposition(role=True, first=0, last=1, settled=True, state=under(txn_id, p.Accepted())))
    client.is_alive()
    if is_discharged:
        assert transactions.discharge(txn_id) == p.Accepted()
    broker.kill()
    broker.start()
    client.sock.close()
    depths = tuple(depth(broker, name) for name in ("l-source", "l-one", "l-two"))
    assert depths == ((0, 2, 2) if is_discharged else (2, 0, 0))
