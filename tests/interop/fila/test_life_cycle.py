"""Unmodified fila-python 0.2.0 against our server: the whole life cycle of a message."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from itertools import islice

import fila
import grpc
import pytest
from fila.v1 import admin_pb2
from tests.interop.fila.conftest import Admin, Server, fila_client

WAIT_S = 30


@pytest.fixture
def client(server: Server) -> Iterator[fila.Client]:
    with fila_client(server.address) as opened:
        yield opened


def code_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    code: grpc.StatusCode = error.value.code()
    return code


def rpc_code_of(error: pytest.ExceptionInfo[fila.RPCError]) -> grpc.StatusCode:
    code: grpc.StatusCode = error.value.code
    return code


@pytest.mark.spec("C3", "C4")
def test_a_message_is_enqueued_consumed_and_acked(admin: Admin, client: fila.Client) -> None:
    queue = admin.queue()
    sent = [client.enqueue(queue, {"tenant": f"t{i}"}, b"payload %d" % i) for i in range(20)]
    assert sent == sorted(sent)
    got = []
    for message in islice(client.consume(queue), 20):
        assert message.queue == queue
        assert message.attempt_count == 0
        assert message.fairness_key == "default"
        got.append((message.id, message.headers, message.payload))
        client.ack(queue, message.id)
    assert got == [(sent[i], {"tenant": f"t{i}"}, b"payload %d" % i) for i in range(20)]
    stats = admin.GetStats(queue=queue)
    assert (stats.depth, stats.in_flight) == (0, 0)


@pytest.mark.spec("C4")
def test_empty_payloads_and_headers_round_trip(admin: Admin, client: fila.Client) -> None:
    queue = admin.queue()
    client.enqueue(queue, None, b"")
    message = next(client.consume(queue))
    assert (message.payload, message.headers) == (b"", {})


def test_the_async_client_supports_the_same_life_cycle(admin: Admin, server: Server) -> None:
    queue = admin.queue()

    async def live() -> list[bytes]:
        async with fila.AsyncClient(server.address) as client:
            ids = await asyncio.gather(*[client.enqueue(queue, None, b"%d" % i) for i in range(50)])
            assert len(set(ids)) == 50
            got = []
            async for message in await client.consume(queue):
                got.append(message.payload)
                await client.ack(queue, message.id)
                if len(got) == 50:
                    break
            return got

    got = asyncio.run(asyncio.wait_for(live(), WAIT_S))
    assert sorted(got) == sorted(b"%d" % i for i in range(50))
    assert admin.GetStats(queue=queue).depth == 0


def test_a_waiting_consumer_gets_new_messages(admin: Admin, client: fila.Client) -> None:
    queue = admin.queue()
    got: list[bytes] = []
    begun = threading.Event()

    def consume() -> None:
        stream = client.consume(queue)
        begun.set()
        for message in islice(stream, 3):
            got.append(message.payload)
            client.ack(queue, message.id)

    thread = threading.Thread(target=consume)
    thread.start()
    assert begun.wait(WAIT_S)
    for payload in (b"one", b"two", b"three"):
        client.enqueue(queue, None, payload)
    thread.join(WAIT_S)
    assert got == [b"one", b"two", b"three"]


@pytest.mark.spec("C8")
def test_a_nacked_message_is_redelivered_with_its_attempt_count(admin: Admin, client: fila.Client) -> None:
    queue = admin.queue()
    sent = client.enqueue(queue, None, b"fragile")
    stream = client.consume(queue)
    for attempts in range(3):
        message = next(stream)
        assert (message.id, message.attempt_count) == (sent, attempts)
        client.nack(queue, message.id, f"failure {attempts}")
    last = next(stream)
    assert last.headers["x-last-error"] == "failure 2"
    client.ack(queue, last.id)
    assert admin.GetStats(queue=queue).depth == 0


@pytest.mark.spec("C9", "C12")
def test_a_script_dead_letters_failures_and_redrive_returns_them(admin: Admin, client: fila.Client) -> None:
    script = """
        function on_failure(msg)
            if msg.attempts >= 2 then return {action = "dlq"} end
            return {action = "retry", delay_ms = 0}
        end
    """
    queue = admin.queue(on_failure_script=script)
    sent = client.enqueue(queue, {"order": "7"}, b"poison")
    stream = client.consume(queue)
    for _ in range(2):
        client.nack(queue, next(stream).id, "broken")
    dead = f"{queue}.dlq"
    assert admin.GetStats(queue=dead).depth == 1
    assert admin.GetStats(queue=queue).depth == 0
    assert admin.Redrive(dlq_queue=dead, count=0).redriven == 1
    back = next(stream)
    assert (back.id, back.attempt_count, back.payload) == (sent, 0, b"poison")
    assert back.headers == {"order": "7"}
    assert admin.GetStats(queue=dead).depth == 0


@pytest.mark.spec("C9")
def test_redrive_moves_the_requested_number(admin: Admin, client: fila.Client) -> None:
    script = 'function on_failure(msg) return {action = "dlq"} end'
    queue = admin.queue(on_failure_script=script)
    for i in range(5):
        client.enqueue(queue, None, b"%d" % i)
    for message in islice(client.consume(queue), 5):
        client.nack(queue, message.id, "")
    dead = f"{queue}.dlq"
    assert admin.Redrive(dlq_queue=dead, count=2).redriven == 2
    assert admin.GetStats(queue=dead).depth == 3
    assert admin.Redrive(dlq_queue=dead, count=100).redriven == 3


@pytest.mark.spec("C10", "C12")
def test_a_script_sets_fairness_key_and_weight(admin: Admin, client: fila.Client) -> None:
    script = """
        function on_enqueue(msg)
            return {fairness_key = msg.headers["tenant"], weight = tonumber(msg.headers["weight"])}
        end
    """
    queue = admin.queue(on_enqueue_script=script)
    for _ in range(30):
        for tenant, weight in (("a", 1), ("b", 2)):
            client.enqueue(queue, {"tenant": tenant, "weight": str(weight)}, b"")
    stats = admin.GetStats(queue=queue)
    assert stats.active_fairness_keys == 2
    assert [(key.key, key.pending_count, key.weight) for key in stats.per_key_stats] == [("a", 30, 1), ("b", 30, 2)]
    keys = [message.fairness_key for message in islice(client.consume(queue), 30)]
    assert abs(keys.count("b") - 20) <= 1


@pytest.mark.spec("C7")
def test_an_expired_lease_counts_as_a_failed_attempt(admin: Admin, client: fila.Client) -> None:
    queue = admin.queue(visibility_timeout_ms=3_000)
    sent = client.enqueue(queue, None, b"slow")
    stream = client.consume(queue)
    assert (first := next(stream)).attempt_count == 0
    second = next(stream)
    assert (second.id, second.attempt_count) == (sent, 1)
    assert first.id == second.id
    client.ack(queue, second.id)
    assert admin.GetStats(queue=queue).depth == 0


@pytest.mark.spec("C7")
def test_the_first_consumers_late_ack_does_not_settle_the_second_delivery(admin: Admin, server: Server) -> None:
    """The sync and the async client have a connection each, which is how this wire tells consumers apart."""
    queue = admin.queue(visibility_timeout_ms=3_000)

    async def race(first: fila.Client) -> None:
        async with fila.AsyncClient(server.address) as second:
            sent = first.enqueue(queue, None, b"contended")
            lost = await asyncio.to_thread(next, first.consume(queue))
            stream = await second.consume(queue)
            again = await anext(stream)
            assert again.id == lost.id == sent
            with pytest.raises(fila.MessageNotFoundError, match="not leased to this connection"):
                await asyncio.to_thread(first.ack, queue, lost.id)
            with pytest.raises(fila.MessageNotFoundError):
                await asyncio.to_thread(first.nack, queue, lost.id, "late")
            await second.ack(queue, again.id)

    with fila_client(server.address) as first:
        asyncio.run(asyncio.wait_for(race(first), WAIT_S))
    assert admin.GetStats(queue=queue).depth == 0


@pytest.mark.spec("C7")
def test_messages_of_a_disconnected_consumer_are_requeued_immediately(admin: Admin, server: Server) -> None:
    queue = admin.queue(visibility_timeout_ms=3_600_000)

    async def take_and_die() -> None:
        async with fila.AsyncClient(server.address) as client:
            stream = await client.consume(queue)
            for _ in range(5):
                await anext(stream)

    with fila_client(server.address) as keeper:
        for i in range(10):
            keeper.enqueue(queue, None, b"%d" % i)
        asyncio.run(asyncio.wait_for(take_and_die(), WAIT_S))
        got = [(message.payload, message.attempt_count) for message in islice(keeper.consume(queue), 10)]
    assert got == [(b"%d" % i, 0) for i in range(10)]


def test_deleting_a_queue_ends_its_streams(admin: Admin, client: fila.Client, channel: grpc.Channel) -> None:
    queue = admin.queue()
    client.enqueue(queue, None, b"last")
    stream = client.consume(queue)
    next(stream)
    admin.DeleteQueue(queue=queue)
    assert list(stream) == []
    with pytest.raises(fila.QueueNotFoundError, match=queue):
        client.enqueue(queue, None, b"")


@pytest.mark.spec("C5")
def test_errors_have_the_status_codes_clients_expect(admin: Admin, client: fila.Client) -> None:
    queue = admin.queue()
    with pytest.raises(fila.QueueNotFoundError, match="missing"):
        client.enqueue("missing", None, b"")
    assert list(client.consume("missing")) == []
    unknown = "0198c0de-0000-7000-8000-000000000000"
    with pytest.raises(fila.MessageNotFoundError):
        client.ack(queue, unknown)
    with pytest.raises(fila.MessageNotFoundError):
        client.nack(queue, unknown, "")
    with pytest.raises(fila.RPCError) as bad_id:
        client.ack(queue, "no id at all")
    assert rpc_code_of(bad_id) is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(fila.RPCError) as too_large:
        client.enqueue(queue, None, bytes(4 << 20))
    assert rpc_code_of(too_large) is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.spec("C5", "C9", "C12")
@pytest.mark.parametrize(
    ("call", "fields", "code"),
    [
        ("CreateQueue", {"name": "{queue}"}, "ALREADY_EXISTS"),
        ("CreateQueue", {"name": ""}, "INVALID_ARGUMENT"),
        ("CreateQueue", {"name": "x" * 300}, "INVALID_ARGUMENT"),
        ("CreateQueue", {"name": "s", "config": {"on_enqueue_script": "function ("}}, "INVALID_ARGUMENT"),
        ("CreateQueue", {"name": "s", "config": {"on_failure_script": "x = 1"}}, "INVALID_ARGUMENT"),
        ("DeleteQueue", {"queue": "missing"}, "NOT_FOUND"),
        ("GetStats", {"queue": "missing"}, "NOT_FOUND"),
        ("Redrive", {"dlq_queue": "missing.dlq"}, "NOT_FOUND"),
        ("Redrive", {"dlq_queue": "{queue}"}, "INVALID_ARGUMENT"),
        ("SetConfig", {"key": "throttle.t", "value": "many"}, "INVALID_ARGUMENT"),
        ("SetConfig", {"key": "", "value": "x"}, "RESOURCE_EXHAUSTED"),
        ("GetConfig", {"key": ""}, "INVALID_ARGUMENT"),
        ("RevokeApiKey", {"key_id": "none"}, "NOT_FOUND"),
        ("GetAcl", {"key_id": "none"}, "NOT_FOUND"),
        ("SetAcl", {"key_id": "none"}, "NOT_FOUND"),
        ("CreateApiKey", {"name": ""}, "INVALID_ARGUMENT"),
        ("CreateApiKey", {"name": "old", "expires_at_ms": 1}, "INVALID_ARGUMENT"),
    ],
)
def test_operators_errors_have_their_status_codes(
    admin: Admin, call: str, fields: dict[str, object], code: str
) -> None:
    queue = admin.queue()
    filled = {name: value.format(queue=queue) if isinstance(value, str) else value for name, value in fields.items()}
    with pytest.raises(grpc.RpcError) as refused:
        getattr(admin, call)(**filled)
    assert code_of(refused).name == code


@pytest.mark.spec("C9")
def test_redrive_to_a_deleted_queue_is_refused_without_loss(admin: Admin, client: fila.Client) -> None:
    queue = admin.queue(on_failure_script='function on_failure(msg) return {action = "dlq"} end')
    client.enqueue(queue, None, b"kept")
    stream = client.consume(queue)
    client.nack(queue, next(stream).id, "")
    admin.DeleteQueue(queue=queue)
    with pytest.raises(grpc.RpcError) as refused:
        admin.Redrive(dlq_queue=f"{queue}.dlq", count=0)
    assert code_of(refused) is grpc.StatusCode.FAILED_PRECONDITION
    assert admin.GetStats(queue=f"{queue}.dlq").depth == 1


@pytest.mark.spec("C14")
def test_settings_are_set_listed_and_never_show_secrets(admin: Admin) -> None:
    assert admin.GetConfig(key="interop.none").value == ""
    admin.SetConfig(key="interop.region", value="north")
    admin.SetConfig(key="interop.password", value="hunter2")
    assert admin.GetConfig(key="interop.region").value == "north"
    assert "hunter2" not in admin.GetConfig(key="interop.password").value
    listed = admin.ListConfig(prefix="interop.")
    assert listed.total_count == 2
    assert [entry.key for entry in listed.entries] == ["interop.password", "interop.region"]
    assert "hunter2" not in str(listed)
    admin.SetConfig(key="interop.region", value="")
    assert admin.ListConfig(prefix="interop.").total_count == 1


@pytest.mark.spec("C11")
def test_a_throttle_delays_messages_and_appears_in_the_stats(admin: Admin, client: fila.Client) -> None:
    script = 'function on_enqueue(msg) return {throttle_keys = {"interop-api"}} end'
    queue = admin.queue(on_enqueue_script=script)
    admin.SetConfig(key="throttle.interop-api", value="0.001,2")
    for _ in range(5):
        client.enqueue(queue, None, b"")
    stream = client.consume(queue)
    for _ in range(2):
        client.ack(queue, next(stream).id)
    stats = admin.GetStats(queue=queue)
    assert (stats.depth, stats.in_flight) == (3, 0)
    throttles = {each.key: each for each in stats.per_throttle_stats}
    assert (throttles["interop-api"].tokens, throttles["interop-api"].burst) == (0.0, 2.0)
    admin.SetConfig(key="throttle.interop-api", value="")
    for _ in range(3):
        client.ack(queue, next(stream).id)


def test_stats_count_leased_messages_and_consumers(admin: Admin, client: fila.Client) -> None:
    queue = admin.queue()
    for _ in range(3):
        client.enqueue(queue, None, b"")
    stream = client.consume(queue)
    first = next(stream)
    while (stats := admin.GetStats(queue=queue)).in_flight < 3:
        pass
    assert (stats.depth, stats.active_consumers, stats.quantum) == (0, 1, 1)
    client.ack(queue, first.id)
    listed = {each.name: each for each in admin.ListQueues().queues}
    assert (listed[queue].depth, listed[queue].in_flight, listed[queue].active_consumers) == (0, 2, 1)
    assert f"{queue}.dlq" in listed


def test_basalt_and_fila_protobuf_messages_work_in_one_process() -> None:
    from basaltmq.wire import fila_wire_pb2

    ours = fila_wire_pb2.RedriveRequest(dlq_queue="q.dlq", count=7)
    theirs = admin_pb2.RedriveRequest.FromString(ours.SerializeToString())
    assert (theirs.dlq_queue, theirs.count) == ("q.dlq", 7)
