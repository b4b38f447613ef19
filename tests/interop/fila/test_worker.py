"""Workers over the network: concurrency, failures handled by the queue, long handlers, and graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.interop.fila.conftest import Admin, Server, until

from basaltmq.client import AsyncClient, AsyncWorker, Client, Leased, Reject, Worker
from basaltmq.errors import InvalidArgumentError, QueueNotFoundError

WAIT_S = 30


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.address) as opened:
        yield opened


@pytest.fixture
def queue(client: Client) -> str:
    name = f"w-{uuid.uuid4().hex[:12]}"
    client.create_queue(name)
    return name


def test_every_message_is_handled_once_by_several_threads(client: Client, queue: str, admin: Admin) -> None:
    client.enqueue(queue, [b"%d" % i for i in range(300)])
    seen: Counter[bytes] = Counter()
    threads: set[str] = set()
    together = threading.Barrier(4, timeout=WAIT_S)

    def handle(message: Leased) -> None:
        if message.payload in (b"0", b"1", b"2", b"3"):
            together.wait()
        seen[message.payload] += 1
        threads.add(threading.current_thread().name)

    with Worker(client, queue, handle, concurrency=4, ahead=20) as worker:
        until(lambda: seen.total() == 300)
    assert seen == {b"%d" % i: 1 for i in range(300)}
    assert len(threads) == 4
    assert (worker.handled, worker.failed, worker.late) == (300, 0, 0)
    stats = admin.GetStats(queue=queue)
    assert (stats.depth, stats.in_flight) == (0, 0)


@pytest.mark.spec("C8", "C9")
def test_failures_are_nacked_and_rejects_are_final(client: Client, queue: str, admin: Admin) -> None:
    client.enqueue(queue, [b"flaky", b"hopeless"])
    attempts: list[int] = []
    done = threading.Event()

    def handle(message: Leased) -> None:
        if message.payload == b"hopeless":
            raise Reject("never")
        attempts.append(message.attempts)
        if message.attempts < 2:
            raise ValueError("not yet")
        done.set()

    with Worker(client, queue, handle, retry_delay_ms=50) as worker:
        assert done.wait(WAIT_S)
        until(lambda: worker.handled == 4)
    assert attempts == [0, 1, 2]
    assert worker.failed == 3
    (dead,) = client.lease(f"{queue}.dlq")
    assert (dead.payload, dead.headers["x-last-error"]) == (b"hopeless", "Reject: never")


@pytest.mark.spec("C8")
def test_an_exception_whose_text_is_not_utf_8_does_not_end_the_worker(
    client: Client, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    # xdist cannot send a captured log with surrogates.
    caplog.set_level(logging.CRITICAL, logger="basaltmq")
    client.enqueue(queue, [b"poison", b"next"])
    done = threading.Event()

    def handle(message: Leased) -> None:
        if message.payload == b"poison":
            raise FileNotFoundError("caf\udce9.csv")
        done.set()

    with Worker(client, queue, handle, concurrency=1, retry_delay_ms=60_000) as worker:
        assert done.wait(WAIT_S)
        until(lambda: worker.handled == 2)
    assert worker.failed == 1


def test_a_handler_may_settle_its_message(client: Client, queue: str, admin: Admin) -> None:
    client.enqueue(queue, [b"1"])

    def handle(message: Leased) -> None:
        client.ack(message)
        raise ValueError("after the fact")

    with Worker(client, queue, handle) as worker:
        until(lambda: worker.handled == 1)
    assert admin.GetStats(queue=queue).depth == 0


@pytest.mark.spec("C7")
def test_a_long_handler_keeps_its_message(client: Client, queue: str, admin: Admin) -> None:
    client.enqueue(queue, b"long")
    begun: list[int] = []

    def handle(message: Leased) -> None:
        begun.append(message.attempts)
        time.sleep(5)

    with Worker(client, queue, handle, concurrency=2, visibility_ms=3_000) as worker:
        until(lambda: worker.handled == 1)
    assert begun == [0]
    assert worker.late == 0
    assert admin.GetStats(queue=queue).depth == 0


@pytest.mark.spec("C7")
def test_a_hanging_handler_loses_its_message_without_lease_extension(client: Client, queue: str) -> None:
    client.enqueue(queue, b"hanging")
    first = threading.Event()
    handled: list[int] = []

    def handle(message: Leased) -> None:
        handled.append(message.attempts)
        if message.attempts == 0:
            assert first.wait(WAIT_S)

    with Worker(client, queue, handle, concurrency=2, visibility_ms=3_000, keep_alive=False) as worker:
        until(lambda: worker.handled == 1)
        first.set()
        until(lambda: worker.late == 1)
    assert handled == [0, 1]


@pytest.mark.spec("C7")
def test_a_stop_finishes_running_handlers_and_releases_the_other_messages(
    client: Client, queue: str, admin: Admin
) -> None:
    client.enqueue(queue, [b"%d" % i for i in range(20)])
    begun, finish = threading.Semaphore(0), threading.Event()

    def handle(message: Leased) -> None:
        begun.release()
        assert finish.wait(WAIT_S)

    worker = Worker(client, queue, handle, concurrency=2, ahead=10, visibility_ms=3_600_000)
    worker.start()
    assert begun.acquire(timeout=WAIT_S)
    assert begun.acquire(timeout=WAIT_S)
    until(lambda: admin.GetStats(queue=queue).in_flight >= 12)
    worker.stop()
    finish.set()
    worker.join()
    assert worker.handled == 2
    until(lambda: admin.GetStats(queue=queue).depth == 18)
    assert {each.attempts for each in client.lease(queue, 100)} == {0}


def test_a_signal_stops_an_idle_worker(client: Client, queue: str) -> None:
    worker = Worker(client, queue, lambda message: None)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    worker.run()
    assert worker.handled == 0


def test_deleting_the_queue_ends_its_worker(client: Client, queue: str) -> None:
    worker = Worker(client, queue, lambda message: None)
    worker.start()
    client.enqueue(queue, b"1")
    until(lambda: worker.handled == 1)
    client.delete_queue(queue)
    with pytest.raises(QueueNotFoundError):
        worker.join()


@pytest.mark.spec("C7")
def test_workers_continue_after_a_broker_restart(serve: Callable[..., Server]) -> None:
    server = serve()
    seen: Counter[bytes] = Counter()

    async def handle(message: Leased) -> None:
        seen[message.payload] += 1

    async def work(stop: threading.Event) -> None:
        async with AsyncClient(server.address) as other:
            worker = AsyncWorker(other, "q", handle)
            running = asyncio.create_task(worker.run())
            await asyncio.to_thread(stop.wait, 2 * WAIT_S)
            worker.stop()
            await asyncio.wait_for(running, WAIT_S)

    with Client(server.address) as client:
        client.create_queue("q")
        with Worker(client, "q", lambda message: seen.update([message.payload])):
            stop = threading.Event()
            thread = threading.Thread(target=asyncio.run, args=(work(stop),))
            thread.start()
            client.enqueue("q", [b"before %d" % i for i in range(10)])
            until(lambda: len(seen) == 10)
            for turn, end in enumerate((server.kill, server.stop), 1):
                end()
                server.start()
                with Client(server.address) as producer:
                    producer.enqueue("q", [b"after %d: %d" % (turn, i) for i in range(10)])
                until(lambda seen_then=10 * (turn + 1): len(seen) == seen_then)  # type: ignore[misc]
            stop.set()
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"concurrency": 5000}, {"ahead": -1}, {"concurrency": "2"}])
def test_invalid_worker_options_are_refused(client: Client, queue: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        Worker(client, queue, lambda message: None, **options)


def test_a_coroutine_function_is_not_a_handler_for_threads(client: Client, queue: str) -> None:
    async def handle(message: Leased) -> None:
        """Never runs."""

    with pytest.raises(InvalidArgumentError, match="AsyncWorker"):
        Worker(client, queue, handle)


@pytest.mark.spec("C8")
def test_an_async_worker_handles_messages_and_failures(
    server: Server, queue: str, client: Client, admin: Admin
) -> None:
    client.enqueue(queue, [b"%d" % i for i in range(100)])

    async def work() -> tuple[AsyncWorker, Counter[bytes], int]:
        seen: Counter[bytes] = Counter()
        running = most = 0

        async def handle(message: Leased) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            seen[message.payload] += 1
            if message.payload == b"7" and message.attempts == 0:
                raise ValueError("once")
            if message.payload == b"8":
                raise Reject("never")
            if seen.total() == 101:
                worker.stop()

        async with AsyncClient(server.address) as other:
            worker = AsyncWorker(other, queue, handle, concurrency=10)
            await asyncio.wait_for(worker.run(), WAIT_S)
        return worker, seen, most

    worker, seen, most = asyncio.run(work())
    assert seen == {b"%d" % i: 1 for i in range(100)} | {b"7": 2}
    assert 1 < most <= 10
    assert (worker.handled, worker.failed) == (101, 2)
    assert admin.GetStats(queue=queue).depth == 0
    assert client.lease(f"{queue}.dlq")[0].payload == b"8"


@pytest.mark.spec("C7")
def test_a_cancelled_async_worker_releases_its_messages(server: Server, queue: str, client: Client) -> None:
    client.enqueue(queue, [b"1", b"2", b"3"])

    async def work() -> None:
        begun = asyncio.Event()

        async def handle(message: Leased) -> None:
            begun.set()
            await asyncio.sleep(3600)

        async with AsyncClient(server.address) as other:
            worker = AsyncWorker(other, queue, handle, concurrency=3, visibility_ms=3_600_000)
            running = asyncio.create_task(worker.run())
            await asyncio.wait_for(begun.wait(), WAIT_S)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(work())
    got: list[bytes] = []

    def has_all() -> bool:
        got.extend(each.payload for each in client.lease(queue, 3, wait=1))
        return len(got) >= 3

    until(has_all)
    assert sorted(got) == [b"1", b"2", b"3"]


@pytest.mark.spec("C8")
def test_failures_are_logged_and_retried_later(
    client: Client, server: Server, queue: str, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    client.enqueue(queue, b"poison")

    def handle(message: Leased) -> None:
        raise ValueError("no such customer")

    with Worker(client, queue, handle, retry_delay_ms=60_000) as worker:
        until(lambda: worker.failed == 1)
        until(lambda: admin.GetStats(queue=queue).depth == 1)
    assert worker.failed == 1
    assert "raise ValueError" in caplog.text
    caplog.clear()

    async def run() -> int:
        async with AsyncClient(server.address) as other:
            await other.enqueue(queue, b"poison too")

            async def fail(message: Leased) -> None:
                worker.stop()
                raise KeyError("missing")

            worker = AsyncWorker(other, queue, fail, retry_delay_ms=60_000)
            await worker.run()
            return worker.failed

    assert asyncio.run(run()) == 1
    assert "raise KeyError" in caplog.text
    assert admin.GetStats(queue=queue).depth == 2
