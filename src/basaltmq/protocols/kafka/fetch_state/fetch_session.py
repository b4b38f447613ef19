"""Fetch sessions (KIP-227): requests and responses carry only partitions that changed since the last fetch.

    request: id, epoch    meaning                                               response
    0, 0                  full request; start a session                         the new session id, all partitions
    id, n                 changed and forgotten partitions; n counts from 1     the same id, changed partitions
    id, -1                full request; close the session                       0, all partitions
    0, -1                 full request without a session                        0, all partitions

A session belongs to its connection and ends with it, so no client can use another client's session. An unknown id gets
FETCH_SESSION_ID_NOT_FOUND, and the client starts a new session. A partition that returned records moves to the end of
the order, so that a full response does not starve the partitions behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol
from uuid import UUID

from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.schema import Fields

NONE: Final = 0
BEGIN: Final = 0
END: Final = -1

PARTITIONS_MAX: Final = 100_000
"""Limit of partitions per session, about 500 bytes each. Larger fetches get no session and stay full requests."""

_EPOCH_MAX: Final = (1 << 31) - 1

TopicRef = str | UUID
"""A topic as requests name it: by name up to version 12, by id since version 13."""


class SentOffsets(NamedTuple):
    """Offsets of a partition that the last response reported."""

    high_watermark: int
    last_stable_offset: int
    log_start_offset: int


class FetchSession:
    """The partitions of one client's session, and the offsets last sent for each."""

    def __init__(self, number: int, has_ids: bool) -> None:
        self.number = number
        self.epoch = 1
        """Epoch expected in the next request."""
        self.has_ids = has_ids
        self._partitions: dict[tuple[TopicRef, int], Fields] = {}
        self._sent: dict[tuple[TopicRef, int], SentOffsets] = {}

    def __len__(self) -> int:
        return len(self._partitions)

    def take(self, body: Fields, has_ids: bool) -> None:
        """Apply the partitions that the request adds, changes and forgets."""
        for topic in body["forgotten_topics"]:
            for partition in topic["partitions"]:
                key = (ref_of(topic, has_ids), partition)
                self._partitions.pop(key, None)
                self._sent.pop(key, None)
        for topic in body["topics"]:
            for each in topic["partitions"]:
                self._partitions[ref_of(topic, has_ids), each["partition"]] = each

    def topics(self) -> list[Fields]:
        """Return all partitions of the session in the form of a full request."""
        found: list[Fields] = []
        for (ref, _), each in self._partitions.items():
            if not found or found[-1]["ref"] != ref:
                found.append({"ref": ref, "topic": ref, "topic_id": ref, "partitions": []})
            found[-1]["partitions"].append(each)
        return found

    def changed_partitions(self, topics: list[Fields]) -> list[Fields]:
        """Return the changed partitions of a full response, and remember the offsets sent."""
        kept: list[Fields] = []
        for topic in topics:
            partitions = []
            for each in topic["partitions"]:
                key = (ref_of(topic, self.has_ids), each["partition"])
                marks = SentOffsets(
                    each.get("high_watermark", -1), each.get("last_stable_offset", -1), each.get("log_start_offset", -1)
                )
                has_records = bool(each.get("records"))
                if has_records or each.get("error_code") or self._sent.get(key) != marks:
                    partitions.append(each)
                if each.get("error_code"):
                    # Report the partition again once it recovers.
                    self._sent.pop(key, None)
                else:
                    self._sent[key] = marks
                if has_records and key in self._partitions:
                    self._partitions[key] = self._partitions.pop(key)
            if partitions:
                kept.append({**topic, "partitions": partitions})
        return kept


def ref_of(topic: Fields, has_ids: bool) -> TopicRef:
    found: TopicRef = topic["topic_id"] if has_ids else topic["topic"]
    return found


class Plan(NamedTuple):
    """The partitions that a fetch reads, and its session."""

    topics: list[Fields]
    session: FetchSession | None
    is_first: bool = True
    """The response contains every partition."""


class SessionOwner(Protocol):
    """A connection, which holds at most one session."""

    fetch_session: FetchSession | None


def plan(client: SessionOwner, body: Fields, has_ids: bool, next_number: Callable[[], int]) -> Plan | int:
    """Return the partitions to fetch, or an error code. Starts, updates or closes `client.fetch_session`."""
    number, epoch = body["session_id"], body["session_epoch"]
    session = client.fetch_session
    if epoch in (BEGIN, END):
        client.fetch_session = None
        if epoch == END or sum(len(topic["partitions"]) for topic in body["topics"]) > PARTITIONS_MAX:
            return Plan(body["topics"], None)
        session = client.fetch_session = FetchSession(next_number(), has_ids)
        session.take(body, has_ids)
        return Plan(session.topics(), session)
    if session is None or session.number != number:
        return e.FETCH_SESSION_ID_NOT_FOUND
    if session.epoch != epoch:
        return e.INVALID_FETCH_SESSION_EPOCH
    if session.has_ids != has_ids:
        return e.FETCH_SESSION_TOPIC_ID_ERROR
    session.epoch = 1 if epoch == _EPOCH_MAX else epoch + 1
    session.take(body, has_ids)
    if len(session) > PARTITIONS_MAX:
        client.fetch_session = None
        return e.FETCH_SESSION_ID_NOT_FOUND
    return Plan(session.topics(), session, is_first=False)
