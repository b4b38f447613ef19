"""CreateTopics, DeleteTopics and Metadata with many topics: one batch and one sync, an error code per topic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.protocols.kafka.test_kafka_transactions import Harness

from basaltmq.errors import StorageError, TimedOutError
from basaltmq.protocols.kafka.wire import api as k
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.store.families import Family

FAMILIES = (Family.SHARDS, Family.CONFIGURED_OBJECTS, Family.OBJECT_NAMES)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path / "store")
    made.topic("there")
    yield made
    made.close()


class Counts:
    """Batches of topics and syncs of the store while `of` runs."""

    def __init__(self, harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes = self.syncs = 0
        write = harness.store.write

        def counted_write(batch: Any, **options: Any) -> None:
            self.writes += any(family is Family.CONFIGURED_OBJECTS for _, family, _, _ in batch.ops)
            write(batch, **options)

        monkeypatch.setattr(harness.store, "write", counted_write)
        # The group commit holds the store's method, so count both.
        for target in (harness.store, harness.context.plane.watermarks):
            monkeypatch.setattr(target, "sync", self._counted(target.sync))

    def _counted(self, sync: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            self.syncs += 1
            sync()

        return counted

    def of(self, ask: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> tuple[dict[str, Any], int, int]:
        before = self.writes, self.syncs
        response = asyncio.run(ask())
        return response, self.writes - before[0], self.syncs - before[1]


def new(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "num_partitions": 1, "replication_factor": 1, "configs": [], **changes}


def create(harness: Harness, topics: list[dict[str, Any]], *, validate_only: bool = False) -> dict[str, Any]:
    body = {"topics": topics, "timeout_ms": 1000, "validate_only": validate_only}
    return asyncio.run(harness.ask(k.CREATE_TOPICS, 5, body))


def codes(topics: list[dict[str, Any]]) -> dict[str, int]:
    return {each["name"]: each["error_code"] for each in topics}


def rows(harness: Harness) -> dict[Family, list[bytes]]:
    return {each: [key for key, _ in harness.store.scan(each) if key != b"N"] for each in FAMILIES}


def test_a_request_for_many_topics_is_one_batch_and_one_sync(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rows(harness)
    counts = Counts(harness, monkeypatch)
    names = [f"t{number}" for number in range(100)]
    wanted = {"topics": [new(name) for name in names], "timeout_ms": 1000}
    response, writes, syncs = counts.of(lambda: harness.ask(k.CREATE_TOPICS, 5, wanted))
    assert codes(response["topics"]) == dict.fromkeys(names, e.NONE)
    assert (writes, syncs) == (1, 1)
    response, writes, syncs = counts.of(
        lambda: harness.ask(k.DELETE_TOPICS, 5, {"topic_names": names, "timeout_ms": 1000})
    )
    assert codes(response["responses"]) == dict.fromkeys(names, e.NONE)
    assert (writes, syncs) == (1, 1)
    assert rows(harness) == before
    asked = {"topics": [{"name": name} for name in [*names, "t0"]], "allow_auto_topic_creation": True}
    response, writes, syncs = counts.of(lambda: harness.ask(k.METADATA, 9, asked))
    assert [each["name"] for each in response["topics"]] == [*names, "t0"]
    assert codes(response["topics"]) == dict.fromkeys(names, e.NONE)
    assert (writes, syncs) == (1, 1)


def test_each_topic_has_its_own_error_code(harness: Harness) -> None:
    wanted = [
        new("good"),
        new("there"),
        new("bad name"),
        new("twice"),
        new("twice"),
        new("none", num_partitions=0),
        new("copies", replication_factor=3),
        new("odd", configs=[{"name": "no.such", "value": "1"}]),
        new("fine", configs=[{"name": "retention.ms", "value": "1000"}]),
    ]
    expected = {
        "good": e.NONE,
        "there": e.TOPIC_ALREADY_EXISTS,
        "bad name": e.INVALID_TOPIC_EXCEPTION,
        "twice": e.INVALID_REQUEST,
        "none": e.INVALID_PARTITIONS,
        "copies": e.INVALID_REPLICATION_FACTOR,
        "odd": e.INVALID_CONFIG,
        "fine": e.NONE,
    }
    checked = create(harness, wanted, validate_only=True)
    assert codes(checked["topics"]) == expected
    assert [each.name for each in harness.context.plane.topics.page().topics] == ["there"]
    made = create(harness, wanted)
    assert [each["name"] for each in made["topics"]] == [each["name"] for each in wanted]
    assert codes(made["topics"]) == expected
    assert [each.name for each in harness.context.plane.topics.page().topics] == ["fine", "good", "there"]
    assert harness.context.topic("fine").config.retention_ms == 1000

    async def delete() -> dict[str, Any]:
        topic_id = harness.context.topic("fine").id
        items = [{"name": "good"}, {"name": "good"}, {"name": "nowhere"}, {"name": None, "topic_id": topic_id}]
        return await harness.ask(k.DELETE_TOPICS, 6, {"topics": items, "timeout_ms": 1000})

    gone = asyncio.run(delete())["responses"]
    assert [(each["name"], each["error_code"]) for each in gone] == [
        ("good", e.NONE),
        ("good", e.UNKNOWN_TOPIC_OR_PARTITION),
        ("nowhere", e.UNKNOWN_TOPIC_OR_PARTITION),
        ("fine", e.NONE),
    ]
    assert [each.name for each in harness.context.plane.topics.page().topics] == ["there"]


def test_a_batch_that_fails_reports_its_error_for_each_topic(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any, **kwargs: Any) -> Any:
        raise TimedOutError("the disk hangs")

    monkeypatch.setattr(harness.context.plane.topics, "_made", slow)
    response = create(harness, [new("a"), new("bad name"), new("b")])
    timed_out = e.code_of(TimedOutError(""))
    assert codes(response["topics"]) == {"a": timed_out, "bad name": e.INVALID_TOPIC_EXCEPTION, "b": timed_out}
    assert timed_out not in {e.NONE, e.code_of(StorageError(""))}
