"""Topics, queues and groups over HTTP as Arrow: reads and writes of programs, and a broker that is killed meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.interop.server import Broker, running

from basaltmq.errors import (
    AccessRefusedError,
    AuthenticationError,
    BasaltError,
    InvalidArgumentError,
    LimitExceededError,
    NotFoundError,
    QueueNotFoundError,
    RemoteError,
    TopicNotFoundError,
    UnavailableError,
)
from basaltmq.http_client import Login, RetryingClient, path
from basaltmq.pipeline.remote import RemoteView
from basaltmq.queues.events.event import decode_events
from basaltmq.streams.imports.stage import SCHEMA
from basaltmq.streams.imports.upload import pack

SECRET = "sesame"  # noqa: S105
WRONG = "s3same"

TLS = Path(__file__).parents[2] / "fixtures" / "tls"

pytestmark = pytest.mark.spec("F1", "F3")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with running(tmp_path_factory.mktemp("broker") / "data", "--events-sample=1") as started:
        yield started


def seen(broker: Broker, user: str = "guest", password: str = "guest", vhost: str = "/") -> RemoteView:  # noqa: S107
    return RemoteView(Login(broker.url("admin"), user, password, vhost))


def chunk(values: list[bytes], key: bytes | None = None) -> pa.RecordBatch:
    count = len(values)
    columns = [
        pa.array([key] * count, pa.binary()),
        pa.array(values, pa.binary()),
        pa.array([[{"key": "h", "value": b"1"}]] * count, SCHEMA.field("headers").type),
        pa.array([1000] * count, pa.int64()).cast(SCHEMA.field("timestamp").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def make(broker: Broker, topic: str, partitions: int = 1, **config: object) -> None:
    broker.call("PUT", path("topics", "/", topic), {"partitions": partitions, **config})


def write(view: RemoteView, topic: str, values: list[bytes], run: str, batch: int, partition: int = 0) -> int:
    part = view.put_part(run, batch, 0, pack([(topic, partition, chunk(values))]))
    return view.commit_batch(run, batch, [part])


def values(view: RemoteView, topic: str, partition: int = 0, begin: int = 0, end: int = 1 << 40) -> list[bytes]:
    found = view.records(topic, partition, begin, end, headers=True)
    return [value for batch in found for value in batch.column("value").to_pylist()]


def test_a_repeated_import_request_is_applied_once(broker: Broker) -> None:
    view = seen(broker)
    make(broker, "orders", 2)
    first = [b"%d" % at for at in range(1000)]
    parts = [view.put_part("run", 0, n, pack([("orders", n, chunk(first, b"k"))])) for n in (0, 1)]
    assert view.commit_batch("run", 0, parts) == 2000
    # The response was lost. Then a retried task staged a part of the batch again.
    assert view.commit_batch("run", 0, parts) == 0
    again = view.put_part("run", 0, 0, pack([("orders", 0, chunk(first, b"k"))]))
    assert view.commit_batch("run", 0, [again]) == 0
    assert write(view, "orders", [b"more"], "run", 1) == 1
    assert broker.call("GET", path("imports", "/", "run"))["last_batch"] == 1
    assert values(view, "orders") == [*first, b"more"]
    assert values(view, "orders", 1, 10, 20) == first[10:20]
    assert "orders" in [topic.name for topic in view.topics()]
    assert (view.info("orders", 0).start_offset, view.info("orders", 0).high_watermark) == (0, 1001)
    assert (view.offset_at("orders", 0, 1000), view.offset_at("orders", 1, 1001)) == (0, 1000)
    (rows,) = view.records("orders", 1, 3, 4, headers=True)
    assert [(r["offset"], r["key"], r["headers"]) for r in rows.to_pylist()] == [
        (3, b"k", [{"key": "h", "value": b"1"}])
    ]
    assert not list((broker.data_dir / "vhosts").glob("*/store/staging/run"))


def test_invalid_parts_of_an_import_are_refused_immediately(broker: Broker) -> None:
    view = seen(broker)
    make(broker, "small", record_bytes_max=100)
    wrong = pa.table({"value": [b"x"]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, wrong.schema) as writer:
        writer.write_table(wrong)
    good = pack([("small", 0, chunk([b"x" * 50]))])
    for raw, error, reported in (
        (b"", InvalidArgumentError, "not an Arrow IPC file"),
        (b"x" * 100_000, InvalidArgumentError, "not an Arrow IPC file"),
        (good[: len(good) // 2], InvalidArgumentError, "not an Arrow IPC file"),
        (bytes(sink.getvalue()), InvalidArgumentError, "a part needs the columns"),
        (good.replace(b'[["small",0,1]]', b'[["small",0,2]]'), InvalidArgumentError, "but declares 2"),
        (good.replace(b'[["small",0,1]]', b'[["small",9,1]]'), RemoteError, "has no partition 9"),
        (good.replace(b'[["small",0,1]]', b'[["small",0,1]}'), InvalidArgumentError, "no valid chunk list"),
        (pack([("none", 0, chunk([b"x"]))]), TopicNotFoundError, "none"),
        (pack([("small", 0, chunk([b"x" * 200]))]), LimitExceededError, "100"),
    ):
        with pytest.raises(error, match=reported):
            view.put_part("bad", 0, 0, raw)
    part = view.put_part("bad", 0, 0, good)
    for changed in ({**part, "crc": part["crc"] + 1}, {**part, "file": "part-00000-" + "0" * 32 + ".arrow"}):
        with pytest.raises(
            (RemoteError, NotFoundError, BasaltError), match=r"has changed since it was staged|is not staged"
        ):
            view.commit_batch("bad", 0, [changed])
    assert values(view, "small") == []
    view.discard_batch("bad", 0)
    assert not list((broker.data_dir / "vhosts").glob("*/store/staging/bad"))


def test_errors_are_reported_in_one_line(broker: Broker) -> None:
    view = seen(broker)
    make(broker, "told")
    for call, error, reported in (
        (lambda: view.topic("nowhere"), TopicNotFoundError, "nowhere"),
        (lambda: view.queue_times("nowhere"), QueueNotFoundError, "nowhere"),
        (lambda: seen(broker, password=WRONG).topic("told"), AuthenticationError, "check the options user and"),
        (lambda: seen(broker, vhost="other").topic("told"), NotFoundError, "other"),
        (lambda: view.commit_group("g", {"told": {7: 1}}), InvalidArgumentError, "partitions 0 to 0, not 7"),
        (lambda: values(view, "told", 3), InvalidArgumentError, "no partition 3"),
    ):
        with pytest.raises(error, match=reported) as caught:
            call()
        assert "\n" not in str(caught.value)
    gone = Login("http://127.0.0.1:1", retry_s=0.2, password=WRONG)
    with pytest.raises(UnavailableError, match=r"no broker responds at http://127\.0\.0\.1:1 .*basalt serve") as down:
        RemoteView(gone).topic("told")
    assert WRONG not in f"{gone!r} {gone} {down.value}"


def test_permissions_are_checked_as_in_other_protocols(broker: Broker) -> None:
    view = seen(broker)
    for name in ("mine", "theirs"):
        make(broker, name)
        write(view, name, [b"x"], f"fill-{name}", 0)
    broker.call("PUT", path("users", "ann"), {"password": SECRET, "tags": ["management"]})
    broker.call("PUT", path("permissions", "/", "ann"), {"configure": "^$", "write": "^mine$", "read": "^(mine|g)$"})
    ann = seen(broker, user="ann", password=SECRET)
    assert values(ann, "mine") == [b"x"]
    assert [topic.name for topic in ann.topics()] == ["mine"]
    ann.commit_group("g", {"mine": {0: 1}})
    refused: list[Callable[[], object]] = [
        lambda: values(ann, "theirs"),
        lambda: ann.commit_group("g", {"theirs": {0: 1}}),
        lambda: ann.commit_group("other", {"mine": {0: 1}}),
        lambda: write(ann, "theirs", [b"y"], "ann", 0),
        lambda: RetryingClient(ann.login).call("PUT", path("topics", "/", "mine-2"), {}),
    ]
    for call in refused:
        with pytest.raises(AccessRefusedError):
            call()
    assert values(view, "theirs") == [b"x"]


def test_only_the_owner_may_change_an_import(broker: Broker) -> None:
    """A user who could forget or advance another user's run could duplicate its records, or make the import skip
    them."""
    for name in ("owned", "other-topic"):
        make(broker, name)
    for user, writes in (("own", "^owned$"), ("oth", "^other-topic$")):
        broker.call("PUT", path("users", user), {"password": SECRET, "tags": ["management"]})
        broker.call("PUT", path("permissions", "/", user), {"configure": "^$", "write": writes, "read": ".*"})
    owner, other = (seen(broker, user=user, password=SECRET) for user in ("own", "oth"))
    write(owner, "owned", [b"1"], "owned-run", 0)
    staged = owner.put_part("owned-run", 1, 0, pack([("owned", 0, chunk([b"2"]))]))
    refused: list[Callable[[], object]] = [
        lambda: other.forget_run("owned-run"),
        lambda: other.discard_batch("owned-run", 1),
        lambda: write(other, "other-topic", [b"x"], "owned-run", 99),
    ]
    for call in refused:
        with pytest.raises(AccessRefusedError):
            call()
    assert owner.commit_batch("owned-run", 1, [staged]) == 1
    assert values(owner, "owned") == [b"1", b"2"]
    owner.put_part("new-run", 0, 0, pack([("owned", 0, chunk([b"3"]))]))
    with pytest.raises(AccessRefusedError):
        other.discard_batch("new-run", 0)
    owner.discard_batch("new-run", 0)
    seen(broker).forget_run("owned-run")


def test_groups_commit_offsets_and_report_their_lag(broker: Broker) -> None:
    view = seen(broker)
    make(broker, "lagging")
    write(view, "lagging", [b"x"] * 10, "fill-lagging", 0)
    view.commit_group("reports", {"lagging": {0: 4}})
    assert [(each.topic, each.committed, each.end_offset, each.lag) for each in view.lag("reports")] == [
        ("lagging", 4, 10, 6)
    ]
    assert "reports" in list(view.groups())


def test_reading_queues_and_events_changes_nothing(broker: Broker) -> None:
    view = seen(broker)
    broker.call("PUT", path("queues", "/", "jobs"), {"durable": True})
    assert view.queue_times("jobs") == (0, 0)
    for at in range(30):
        message = {"properties": {"delivery_mode": 2}, "routing_key": "jobs", "payload_encoding": "string"}
        # Two of them have their bodies outside of their rows.
        body = f"m{at}" if at % 15 else "x" * 10_000
        broker.call("POST", path("exchanges", "/", "amq.default", "publish"), {**message, "payload": body})
    found = [row for batch in view.messages("jobs", 0, 1 << 62) for row in batch.to_pylist()]
    assert [row["value"] for row in found] == [b"m%d" % at if at % 15 else b"x" * 10_000 for at in range(30)]
    times = [row["offset"] for row in found]
    assert (times[0], times[-1]) == view.queue_times("jobs")
    later = [row["value"] for batch in view.messages("jobs", times[27] + 1, 1 << 62) for row in batch.to_pylist()]
    assert later == [b"m28", b"m29"]
    assert broker.call("GET", path("queues", "/", "jobs"))["messages"] == 30
    # Events gather for a moment before they are written.
    kinds: list[str] = []
    waited = threading.Event()
    for _ in range(600):
        with contextlib.suppress(TopicNotFoundError):
            kinds = [e.kind.name for raw in values(view, "__events") for e in decode_events(raw) if e.queue == "jobs"]
        if len(kinds) >= 30:
            break
        waited.wait(0.05)
    assert kinds == ["ENQUEUED"] * 30


@pytest.mark.promise("P2")
def test_readers_and_writers_wait_for_a_killed_broker(tmp_path: Path) -> None:
    """Over TLS. No record is read twice, every requested record arrives, and an interrupted batch is imported once."""
    flags = (f"--tls-certificate={TLS / 'server.pem'}", f"--tls-key={TLS / 'server.key'}", "--admin-tls=true")
    with running(tmp_path / "data", *flags) as broker:
        server = f"https://localhost:{broker.port('admin')}"
        with pytest.raises(UnavailableError, match=r"not trusted .*option ca"):
            RemoteView(Login(server, retry_s=0.0)).topic("orders")
        login = Login(server, ca=(TLS / "authority.pem").read_text())
        view = RemoteView(login, RetryingClient(login, is_known=True))
        RetryingClient(login).call("PUT", path("topics", "/", "orders"), {})
        expected = [b"%06d" % at + b"x" * 1000 for at in range(10_000)]
        parts = [view.put_part("run", 0, 0, pack([("orders", 0, chunk(expected[:5_000]))]))]
        parts.append(view.put_part("run", 0, 1, pack([("orders", 0, chunk(expected[5_000:]))])))
        assert view.commit_batch("run", 0, parts) == 10_000
        reading = view.records("orders", 0, 0, 10_000)
        found = next(reading).column("value").to_pylist()
        part = view.put_part("run", 1, 0, pack([("orders", 0, chunk([b"last"]))]))
        broker.kill()
        back = threading.Thread(target=broker.start)
        back.start()
        assert view.commit_batch("run", 1, [part]) == 1
        found += [value for batch in reading for value in batch.column("value").to_pylist()]
        back.join()
        assert found == expected
        assert values(view, "orders", begin=9_999) == [expected[-1], b"last"]


def test_memory_of_many_readers_is_bounded(broker: Broker) -> None:
    view = seen(broker)
    make(broker, "wide")
    write(view, "wide", [b"x" * 100_000] * 100, "fill-wide", 0)
    held = [view.records("wide", 0, 0, 100) for _ in range(4)]
    firsts = [next(each).num_rows for each in held]
    # A slice has 2 MiB: no reader had received everything, and every reader gets the rest.
    assert max(firsts) < 50
    totals = [count + sum(batch.num_rows for batch in each) for count, each in zip(firsts, held, strict=True)]
    assert totals == [100] * 4
