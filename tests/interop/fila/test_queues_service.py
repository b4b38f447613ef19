"""basalt.v1 with our client: batches, leases with tokens, long polls, session, streaming produce."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tests.interop.fila.conftest import Admin, Server, until

from basaltmq.client import AsyncClient, Client, Draft
from basaltmq.client import channel as calls
from basaltmq.client.cancellation import Cancellation
from basaltmq.errors import (
    BasaltError,
    InvalidArgumentError,
    InvalidConfigError,
    LimitExceededError,
    PreconditionFailedError,
    QueueExistsError,
    QueueFullError,
    QueueNotFoundError,
    ScriptError,
    StaleLeaseError,
    UnavailableError,
)
from basaltmq.wire import basalt_pb2 as wire

WAIT_S = 30


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.address) as opened:
        yield opened


@pytest.fixture
def queue(client: Client) -> str:
    name = f"b-{uuid.uuid4().hex[:12]}"
    client.create_queue(name)
    return name


@pytest.mark.spec("C4", "C6")
def test_a_batch_is_enqueued_leased_and_acked(client: Client, queue: str, admin: Admin) -> None:
    ids = client.enqueue(queue, [b"%d" % i for i in range(100)])
    held = client.lease(queue, 60)
    assert [each.id for each in held] == ids[:60]
    assert [each.payload for each in held] == [b"%d" % i for i in range(60)]
    assert len({each.token for each in held}) == 1
    assert client.ack(held) == 60
    assert all(each.settled for each in held)
    assert client.ack(client.lease(queue, 1000)) == 40
    assert client.lease(queue) == []
    assert admin.GetStats(queue=queue).depth == 0


@pytest.mark.spec("C4", "E7")
def test_all_fields_of_a_draft_arrive(client: Client) -> None:
    queue = f"b-{uuid.uuid4().hex[:12]}"
    client.create_queue(queue, priorities_max=5)
    draft = Draft(payload=b"p", headers={"k": "v"}, fairness_key="tenant", weight=3, priority=2)
    one = client.enqueue(queue, draft)
    assert isinstance(one, bytes)
    client.enqueue(queue, ["text", draft, b"plain"])
    held = {each.payload + bytes([i]): each for i, each in enumerate(client.lease(queue, 10))}
    assert len(held) == 4
    mine = next(each for each in held.values() if each.id == one)
    assert (mine.headers, mine.fairness_key, mine.weight, mine.priority) == ({"k": "v"}, "tenant", 3, 2)
    assert {each.text() for each in held.values()} == {"p", "text", "plain"}


@pytest.mark.spec("C4", "E7")
def test_a_queue_is_created_with_all_settings(client: Client, server: Server) -> None:
    name = f"b-{uuid.uuid4().hex[:12]}"
    settings: Any = {
        "visibility_timeout_ms": 500,
        "attempts_max": 2,
        "dead_letter_queue": f"{name}-dead",
        "length_max": 3,
        "overflow": "reject-publish",
        "priorities_max": 4,
        "dedup_window_ms": 60_000,
        "durability": "written",
    }
    client.create_queue(name, **settings)
    first = client.enqueue(name, Draft(payload=b"low", priority=1, dedup_id=b"1"))
    assert client.enqueue(name, Draft(payload=b"again", dedup_id=b"1")) == first
    client.enqueue(name, [Draft(payload=b"high", priority=4), b"none"])
    with pytest.raises(QueueFullError):
        client.enqueue(name, b"one too many")
    assert [each.payload for each in client.lease(name, 1)] == [b"high"]
    for _ in range(2):
        client.nack(client.lease(name, 1), "no")
    assert [each.payload for each in client.lease(f"{name}-dead", wait=WAIT_S)] == [b"low"]
    with pytest.raises(InvalidConfigError, match="overflow"):
        client.create_queue(f"{name}-bad", overflow="explode")
    with pytest.raises(TypeError):
        client.create_queue(f"{name}-bad", None)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("draft", "option"),
    [(Draft(payload=b"x", dedup_id=b"1"), "dedup_window_ms"), (Draft(payload=b"x", priority=1), "priorities_max")],
)
def test_unsupported_settings_are_refused_by_name(client: Client, queue: str, draft: Draft, option: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{queue}.*{option}"):
        client.enqueue(queue, draft)
    with pytest.raises(InvalidArgumentError, match=f"{queue}.*{option}"), client.producer(queue) as producer:
        producer.send([draft]).result(WAIT_S)
    assert client.lease(queue) == []


def test_a_batch_is_enqueued_atomically(client: Client, queue: str, admin: Admin) -> None:
    with pytest.raises(LimitExceededError, match="fairness key"):
        client.enqueue(queue, [b"good", Draft(payload=b"bad", fairness_key="x" * 5000)])
    assert admin.GetStats(queue=queue).depth == 0


@pytest.mark.spec("C8", "C9")
def test_nack_release_and_reject_have_their_effects(client: Client, queue: str, admin: Admin) -> None:
    client.enqueue(queue, [b"1", b"2", b"3"])
    retried, released, rejected = client.lease(queue, 3)
    client.nack(retried, "try again")
    client.release(released)
    client.nack(rejected, "hopeless", reject=True)
    again = {each.payload: each for each in client.lease(queue, 3)}
    assert {payload: each.attempts for payload, each in again.items()} == {b"1": 1, b"2": 0}
    assert again[b"1"].headers["x-last-error"] == "try again"
    assert client.lease(f"{queue}.dlq")[0].payload == b"3"
    client.nack(again[b"1"], delay_ms=3_600_000)
    stats = admin.GetStats(queue=queue)
    assert (stats.depth, stats.in_flight) == (1, 1)


@pytest.mark.spec("C7")
def test_a_request_with_an_outdated_token_has_no_effect(client: Client, queue: str) -> None:
    client.enqueue(queue, [b"1", b"2"])
    first, second = client.lease(queue, 2)
    client.release(second)
    (again,) = client.lease(queue)
    assert again.id == second.id
    assert again.token != second.token
    with pytest.raises(StaleLeaseError):
        client.ack([first, second])
    with pytest.raises(StaleLeaseError):
        client.nack(second)
    with pytest.raises(StaleLeaseError):
        client.extend(second)
    assert client.ack(first) == 1, "the refused call settled nothing"
    assert client.ack(again) == 1


@pytest.mark.spec("C7")
def test_an_extended_lease_stays_and_another_expires(client: Client, queue: str) -> None:
    client.enqueue(queue, [b"kept", b"lost"])
    kept, lost = client.lease(queue, 2, visibility_ms=4_000)
    before = kept.token
    client.extend(kept, 3_600_000)
    assert kept.token != before, "a part of a lease has a token of its own"
    (again,) = client.lease(queue, 10, wait=WAIT_S)
    assert (again.id, again.attempts) == (lost.id, 1)
    with pytest.raises(StaleLeaseError):
        client.ack(lost)
    assert client.ack([kept, again]) == 2


def test_a_long_poll_ends_at_the_first_message_or_its_timeout(client: Client, queue: str) -> None:
    assert client.lease(queue, 5, wait=0.05) == []
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.lease, queue, 5, wait=WAIT_S)
        client.enqueue(queue, b"here")
        assert [each.payload for each in waiting.result(WAIT_S)] == [b"here"]


def test_concurrent_polls_get_each_message_once(client: Client, queue: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        polls = [pool.submit(client.lease, queue, 1, wait=WAIT_S) for _ in range(8)]
        client.enqueue(queue, [b"%d" % i for i in range(8)])
        got = [poll.result(WAIT_S)[0].payload for poll in polls]
    assert sorted(got) == [b"%d" % i for i in range(8)]


@pytest.mark.spec("C7")
def test_a_cancelled_poll_leases_nothing(client: Client, queue: str) -> None:
    cancellation = Cancellation()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.lease, queue, 5, wait=WAIT_S, cancellation=cancellation)
        cancellation.cancel()
        assert waiting.result(WAIT_S) == []
    client.enqueue(queue, b"whole")
    assert [each.payload for each in client.lease(queue, 5, wait=WAIT_S)] == [b"whole"]


@pytest.mark.spec("C7")
def test_leases_of_a_disconnected_client_are_released_immediately(server: Server, client: Client, queue: str) -> None:
    client.enqueue(queue, [b"1", b"2", b"3"])
    leaving = Client(server.address)
    held = leaving.lease(queue, 3, visibility_ms=3_600_000)
    leaving.ack(held[0])
    leaving.extend(held[1], 3_600_000)
    leaving.close()
    got: list[tuple[bytes, int]] = []

    def has_both() -> bool:
        got.extend((each.payload, each.attempts) for each in client.lease(queue, 3, wait=1))
        return len(got) >= 2

    until(has_both)
    assert sorted(got) == [(b"2", 0), (b"3", 0)]


def test_lease_numbers_of_other_sessions_are_refused(client: Client, queue: str, channel: grpc.Channel) -> None:
    lease: Any = channel.unary_unary(
        "/basalt.v1.Queues/Lease", wire.LeaseRequest.SerializeToString, wire.LeaseResponse.FromString
    )
    client.enqueue(queue, [b"1"])
    with pytest.raises(grpc.RpcError) as refused:
        lease(wire.LeaseRequest(queue=queue, session=client._run(client._client._session.number())))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION, "another connection's number"
    assert [each.payload for each in lease(wire.LeaseRequest(queue=queue)).messages] == [b"1"]


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda c, q: c.enqueue("missing", b""), QueueNotFoundError),
        (lambda c, q: c.lease("missing"), QueueNotFoundError),
        (lambda c, q: c.lease("missing", wait=5), QueueNotFoundError),
        (lambda c, q: c.create_queue(q), QueueExistsError),
        (lambda c, q: c.create_queue("x", on_enqueue_script="("), ScriptError),
        (lambda c, q: c.enqueue(q, []), InvalidArgumentError),
        (lambda c, q: c.enqueue(q, 7), InvalidArgumentError),
        (lambda c, q: c.enqueue(q, [7]), InvalidArgumentError),
        (lambda c, q: c.enqueue(q, "\ud800"), InvalidArgumentError),
        (lambda c, q: c.enqueue(q, Draft(payload=b"", weight=-1)), InvalidArgumentError),
        (lambda c, q: c.lease(q, 0), InvalidArgumentError),
        (lambda c, q: c.lease(q, wait=-1), InvalidArgumentError),
        (lambda c, q: c.lease(q, 20_000), LimitExceededError),
        (lambda c, q: c.ack([b"no message"]), InvalidArgumentError),
        (lambda c, q: c.extend_lease(q, 7), StaleLeaseError),
    ],
)
def test_errors_are_the_same_as_with_an_embedded_queue(client: Client, queue: str, call: Any, kind: type) -> None:
    with pytest.raises(kind) as refused:
        call(client, queue)
    assert isinstance(refused.value, BasaltError)


def test_hostile_requests_are_refused(queue: str, channel: grpc.Channel) -> None:
    def call(method: str, request: Any) -> grpc.StatusCode:
        raw: Any = channel.unary_unary(f"/basalt.v1.Queues/{method}")
        with pytest.raises(grpc.RpcError) as refused:
            raw(request if isinstance(request, bytes) else request.SerializeToString(), timeout=WAIT_S)
        code: grpc.StatusCode = refused.value.code()
        return code

    invalid = grpc.StatusCode.INVALID_ARGUMENT
    assert call("AckBatch", wire.AckBatchRequest(queue=queue, token=1, ids=[b"short"])) is invalid
    assert call("Extend", wire.ExtendRequest(queue=queue, token=1, visibility_ms=1 << 63)) is invalid
    assert call("NackBatch", wire.NackBatchRequest(queue=queue, token=1, delay_ms=1 << 63)) is invalid
    assert call("Lease", wire.LeaseRequest(queue=queue, consumer="x" * 300)) is invalid
    assert call("Lease", wire.LeaseRequest()) is invalid
    assert call("EnqueueBatch", wire.EnqueueBatchRequest(queue=queue)) is invalid
    assert call("EnqueueBatch", b"\xff" * 50) is invalid
    assert call("EnqueueBatch", b"\x12\x7f") is invalid
    assert call("Missing", b"") is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("frame_bytes", [16_384, 1 << 20])
def test_large_batches_reach_clients_with_any_max_frame_size(queue: str, server: Server, frame_bytes: int) -> None:
    """grpcio sends frames up to the size that we announce, and announces its own limit."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.max_frame_size", frame_bytes),
        ("grpc.max_receive_message_length", -1),
    ]
    payloads = [bytes([number]) * (1_000 + 40 * number) for number in range(250)]
    with grpc.insecure_channel(server.address, options=options) as channel:
        enqueue: Any = channel.unary_unary("/basalt.v1.Queues/EnqueueBatch")
        lease: Any = channel.unary_unary("/basalt.v1.Queues/Lease")
        batch = wire.EnqueueBatchRequest(queue=queue, payloads=payloads)
        ids = wire.EnqueueBatchResponse.FromString(enqueue(batch.SerializeToString(), timeout=WAIT_S)).ids
        request = wire.LeaseRequest(queue=queue, max=len(payloads)).SerializeToString()
        found = wire.LeaseResponse.FromString(lease(request, timeout=WAIT_S)).messages
    assert [each.payload for each in found] == payloads
    assert [each.id for each in found] == list(ids)


@pytest.mark.promise("P1")
def test_a_stream_of_batches_is_confirmed_in_order(client: Client, queue: str, admin: Admin) -> None:
    with client.producer(queue) as producer:
        confirms = [producer.send([b"%d" % i, b"second"]) for i in range(200)]
    ids = [message_id for confirm in confirms for message_id in confirm.result(WAIT_S)]
    assert len(ids) == 400
    assert ids == sorted(ids)
    assert admin.GetStats(queue=queue).depth == 400
    assert client.lease(queue)[0].payload == b"0"
    with pytest.raises(InvalidArgumentError, match="closed"):
        producer.send([b"late"])


def test_a_refused_batch_does_not_end_the_stream(client: Client, queue: str) -> None:
    with client.producer(queue) as producer:
        first = producer.send([b"1"])
        bad = producer.send([Draft(payload=b"", fairness_key="x" * 5000)])
        last = producer.send([b"2"])
    assert len(first.result(WAIT_S)) == len(last.result(WAIT_S)) == 1
    with pytest.raises(LimitExceededError):
        bad.result(WAIT_S)
    with client.producer("missing") as producer:
        gone = producer.send([b"1"])
    with pytest.raises(QueueNotFoundError):
        gone.result(WAIT_S)


def test_a_producer_that_does_not_read_its_confirms_is_paused(queue: str, server: Server, admin: Admin) -> None:
    """The server stops reading when unsent confirms fill the client's window."""
    sent = 0
    is_stuck = threading.Event()

    def requests() -> Iterator[wire.ProduceRequest]:
        nonlocal sent
        batch = wire.EnqueueBatchRequest(queue=queue, payloads=[b"small"] * 100)
        while not is_stuck.is_set():
            sent += 1
            yield wire.ProduceRequest(number=sent, batch=batch)

    with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        produce: Any = channel.stream_stream("/basalt.v1.Queues/Produce", wire.ProduceRequest.SerializeToString)
        responses = produce(requests())
        seen: list[int] = []

        def has_stopped() -> bool:
            is_stuck.wait(0.1)
            seen.append(admin.GetStats(queue=queue).depth)
            return seen[-1] > 0 and seen[-15:] == seen[-1:] * 15

        try:
            until(has_stopped)
        finally:
            is_stuck.set()
            responses.cancel()


def test_an_unreachable_broker_is_a_retriable_error() -> None:
    with Client("127.0.0.1:1", timeout=5) as client, pytest.raises(UnavailableError) as refused:
        client.enqueue("q", b"")
    assert refused.value.retriable


def test_the_async_client_behaves_like_the_threaded_one(server: Server, queue: str) -> None:
    async def live() -> None:
        async with AsyncClient(server.address) as client:
            name = f"{queue}-async"
            await client.create_queue(name, visibility_timeout_ms=3_600_000)
            ids = await client.enqueue(name, [b"1", b"2", b"3"])
            assert isinstance(await client.enqueue(name, "4"), bytes)
            held = await client.lease(name, 10)
            assert [each.id for each in held[:3]] == ids
            assert await client.ack(held[0]) == 1
            await client.nack(held[1], "again")
            await client.release(held[2])
            before = held[3].token
            await client.extend(held[3], 60_000)
            assert held[3].token == before, "what is left of the lease is this one"
            await client.extend_lease(name, held[3].token)
            assert {each.payload: each.attempts for each in await client.lease(name, 10)} == {b"2": 1, b"3": 0}
            waiting = asyncio.create_task(client.lease(name, wait=WAIT_S))
            await asyncio.sleep(0)
            await client.enqueue(name, b"5")
            assert [each.payload for each in await waiting] == [b"5"]
            with pytest.raises(StaleLeaseError):
                await client.ack(held[0])
            with pytest.raises(QueueNotFoundError):
                await client.lease("missing")
            cancelled = asyncio.create_task(client.lease(name, wait=WAIT_S))
            await asyncio.sleep(0.05)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            await client.enqueue(name, b"6")
            assert [each.payload for each in await client.lease(name, wait=WAIT_S)] == [b"6"]
            await client.delete_queue(name)

    asyncio.run(asyncio.wait_for(live(), 2 * WAIT_S))


def test_a_lease_survives_a_restart_of_the_broker(server: Server, queue: str, client: Client) -> None:
    """The broker does not know the session any more. The client begins another one without the caller."""
    client.enqueue(queue, b"1")
    leasing_session = client.open_session()
    number = client._run(leasing_session.number())
    assert client.ack(client.lease(queue, session=leasing_session)) == 1
    leasing_session._number = number + 1_000_000
    client.enqueue(queue, b"2")
    assert client.lease(queue, wait=WAIT_S, session=leasing_session)[0].payload == b"2"
    with pytest.raises(PreconditionFailedError):
        client._run(client._client._call(calls.LEASE, wire.LeaseRequest(queue=queue, session=number + 1_000_000)))
    client.end_session(leasing_session)
