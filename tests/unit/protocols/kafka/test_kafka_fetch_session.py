"""Fetch sessions: the partitions of each request and response."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from basaltmq.protocols.kafka.fetch_state import fetch_session as module
from basaltmq.protocols.kafka.fetch_state.fetch_session import FetchSession, Plan, plan
from basaltmq.protocols.kafka.wire import errors as e

Fields = dict[str, Any]


def asking(
    session: tuple[int, int], partitions: dict[str, list[int]], forgotten: dict[str, list[int]] | None = None
) -> Fields:
    return {
        "session_id": session[0],
        "session_epoch": session[1],
        "topics": [
            {"topic": name, "topic_id": None, "partitions": [{"partition": at, "fetch_offset": 0} for at in each]}
            for name, each in partitions.items()
        ],
        "forgotten_topics": [
            {"topic": name, "topic_id": None, "partitions": each} for name, each in (forgotten or {}).items()
        ],
    }


class Client:
    """A connection with its responses."""

    def __init__(self) -> None:
        self.holder = SimpleNamespace(fetch_session=None)
        self.number = 0

    def ask(self, *asked: Any, has_ids: bool = False) -> Plan | int:
        def next_number() -> int:
            self.number += 1
            return self.number

        return plan(self.holder, asking(*asked), has_ids, next_number)

    def wanted(self, *asked: Any) -> list[tuple[str, int]]:
        found = self.ask(*asked)
        assert isinstance(found, Plan)
        return [(topic["topic"], each["partition"]) for topic in found.topics for each in topic["partitions"]]

    def reported(self, *partitions: tuple[str, int, int, bytes, int]) -> list[tuple[str, int]]:
        """Return the partitions that a session reports, of a full response with these (topic, partition, high
        watermark, records, error)."""
        session = self.holder.fetch_session
        assert isinstance(session, FetchSession)
        topics = [
            {
                "topic": name,
                "topic_id": None,
                "partitions": [
                    {"partition": at, "records": records, "error_code": code, "high_watermark": mark}
                    if code
                    else {"partition": at, "records": records, "high_watermark": mark}
                ],
            }
            for name, at, mark, records, code in partitions
        ]
        return [
            (topic["topic"], each["partition"])
            for topic in session.changed_partitions(topics)
            for each in topic["partitions"]
        ]


def test_partitions_are_added_changed_and_forgotten() -> None:
    client = Client()
    assert client.wanted((0, 0), {"a": [0, 1], "b": [0]}) == [("a", 0), ("a", 1), ("b", 0)]
    assert client.wanted((1, 1), {}) == [("a", 0), ("a", 1), ("b", 0)]
    assert client.wanted((1, 2), {"c": [0]}, {"a": [1], "none": [5]}) == [("a", 0), ("b", 0), ("c", 0)]
    assert client.reported(("a", 0, 5, b"", 0)) == [("a", 0)], "what it does not know yet"
    assert client.reported(("a", 0, 5, b"", 0)) == []
    assert client.wanted((1, 3), {}, {"a": [0]}) == [("b", 0), ("c", 0)]
    assert client.wanted((1, 4), {"a": [0]}) == [("b", 0), ("c", 0), ("a", 0)]
    assert client.reported(("a", 0, 5, b"", 0)) == [("a", 0)], "forgotten, it is told again"


def test_changed_partitions_have_new_records_watermarks_or_errors() -> None:
    client = Client()
    client.wanted((0, 0), {"a": [0], "b": [0]})
    assert client.reported(("a", 0, 0, b"", 0), ("b", 0, 0, b"", 0)) == [("a", 0), ("b", 0)]
    assert client.reported(("a", 0, 1, b"", 0), ("b", 0, 0, b"", 0)) == [("a", 0)]
    assert client.reported(("a", 0, 1, b"x", 0), ("b", 0, 0, b"", 0)) == [("a", 0)]
    for _ in range(2):
        assert client.reported(("a", 0, 1, b"", 0), ("b", 0, 0, b"", e.UNKNOWN_TOPIC_OR_PARTITION)) == [("b", 0)]
    assert client.reported(("a", 0, 1, b"", 0), ("b", 0, 0, b"", 0)) == [("b", 0)], "it is well again"


def test_a_partition_that_returned_records_moves_to_the_end() -> None:
    client = Client()
    client.wanted((0, 0), {"a": [0], "b": [0], "c": [0]})
    client.reported(("a", 0, 9, b"x", 0), ("b", 0, 9, b"", 0), ("c", 0, 9, b"", 0))
    assert client.wanted((1, 1), {}) == [("b", 0), ("c", 0), ("a", 0)]


def test_fetch_sessions_check_epochs_and_closing(monkeypatch: Any) -> None:
    client = Client()
    assert client.ask((7, 1), {}) == e.FETCH_SESSION_ID_NOT_FOUND
    client.wanted((0, 0), {"a": [0]})
    for epoch in (2, 3, 99):
        assert client.ask((1, epoch), {}) == e.INVALID_FETCH_SESSION_EPOCH
    assert client.ask((2, 1), {}) == e.FETCH_SESSION_ID_NOT_FOUND
    assert client.ask((1, 1), {}, has_ids=True) == e.FETCH_SESSION_TOPIC_ID_ERROR
    assert client.wanted((1, 1), {}) == [("a", 0)]
    client.holder.fetch_session.epoch = (1 << 31) - 1
    assert client.wanted((1, (1 << 31) - 1), {}) == [("a", 0)]
    assert client.wanted((1, 1), {}) == [("a", 0)], "epochs go round, past the one that begins"
    ended = client.ask((1, -1), {"b": [0]})
    assert isinstance(ended, Plan)
    assert (ended.session, client.holder.fetch_session) == (None, None)
    monkeypatch.setattr(module, "PARTITIONS_MAX", 2)
    large = client.ask((0, 0), {"a": [0, 1, 2]})
    assert isinstance(large, Plan)
    assert large.session is None, "it says all of it every time"
    client.wanted((0, 0), {"a": [0, 1]})
    number = client.number
    assert client.ask((number, 1), {"b": [0]}) == e.FETCH_SESSION_ID_NOT_FOUND
    assert client.holder.fetch_session is None
