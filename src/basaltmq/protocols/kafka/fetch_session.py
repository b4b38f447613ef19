"""Fetch sessions (KIP-227): a client says what it wants once, then only what changes, and hears only what changed.

    asked: id, epoch    what it means                                       answered with
    0, 0                all that is wanted is in the request; begin         the session's id, every partition
    id, n               add, change and forget; n counts up from 1          the same id, partitions with news
    id, -1              all is in the request; the session ends             0, every partition
    0, -1               all is in the request, without a session            0, every partition

A session belongs to the connection it was begun on, so nobody can touch another's, and it goes with it. A client that
names one that is not there is told so, and begins again. Partitions that brought records move to the end of the line,
so that those behind them get their turn when an answer is full.
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
"""Partitions one session may hold, some 500 bytes each; a client that wants more says all of it every time."""

_EPOCH_MAX: Final = (1 << 31) - 1

Ref = str | UUID
"""A topic as requests name it: by name up to version 12, by id since 13."""


class Told(NamedTuple):
    """What the client knows of a partition."""

    high_watermark: int
    last_stable_offset: int
    log_start_offset: int


class FetchSession:
    """What one client wants, and what it knows."""

    def __init__(self, number: int, has_ids: bool) -> None:
        self.number = number
        self.epoch = 1
        """Expected of the next request."""
        self.has_ids = has_ids
        self._asked: dict[tuple[Ref, int], Fields] = {}
        self._told: dict[tuple[Ref, int], Told] = {}

    def __len__(self) -> int:
        return len(self._asked)

    def take(self, body: Fields, has_ids: bool) -> None:
        """Add, change and forget partitions as the request says."""
        for topic in body["forgotten_topics"]:
            for partition in topic["partitions"]:
                key = (ref_of(topic, has_ids), partition)
                self._asked.pop(key, None)
                self._told.pop(key, None)
        for topic in body["topics"]:
            for each in topic["partitions"]:
                self._asked[ref_of(topic, has_ids), each["partition"]] = each

    def topics(self) -> list[Fields]:
        """All that is wanted, as a request would say it."""
        found: list[Fields] = []
        for (ref, _), each in self._asked.items():
            if not found or found[-1]["ref"] != ref:
                found.append({"ref": ref, "topic": ref, "topic_id": ref, "partitions": []})
            found[-1]["partitions"].append(each)
        return found

    def news(self, topics: list[Fields]) -> list[Fields]:
        """Of an answer about all partitions, what the client does not know."""
        kept: list[Fields] = []
        for topic in topics:
            partitions = []
            for each in topic["partitions"]:
                key = (ref_of(topic, self.has_ids), each["partition"])
                marks = Told(
                    each.get("high_watermark", -1), each.get("last_stable_offset", -1), each.get("log_start_offset", -1)
                )
                has_records = bool(each.get("records"))
                if has_records or each.get("error_code") or self._told.get(key) != marks:
                    partitions.append(each)
                if each.get("error_code"):
                    # It hears of the partition again when that has recovered.
                    self._told.pop(key, None)
                else:
                    self._told[key] = marks
                if has_records and key in self._asked:
                    self._asked[key] = self._asked.pop(key)
            if partitions:
                kept.append({**topic, "partitions": partitions})
        return kept


def ref_of(topic: Fields, has_ids: bool) -> Ref:
    found: Ref = topic["topic_id"] if has_ids else topic["topic"]
    return found


class Plan(NamedTuple):
    """What a request comes to."""

    topics: list[Fields]
    session: FetchSession | None
    is_first: bool = True
    """The answer names every partition."""


class Holder(Protocol):
    """A connection."""

    fetch_session: FetchSession | None


def plan(client: Holder, body: Fields, has_ids: bool, next_number: Callable[[], int]) -> Plan | int:
    """What is wanted; or the code of an error. `client.fetch_session` is begun, changed or ended."""
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
