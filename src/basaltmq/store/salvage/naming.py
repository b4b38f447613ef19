"""Describes lost key ranges for operators: queue and message id, topic and offset, object name.

A range is described by the readable rows next to it: "messages between id x and id y". A single lost row is described
by its key. Names that a key does not contain (of a topic or an object by its id) come from the name index, if it is
readable. Rows of derived families are not losses, because a repair rebuilds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final
from uuid import UUID

import msgspec

from basaltmq.errors import BasaltError
from basaltmq.store.families import BY_LABEL, Family
from basaltmq.store.keys import catalog as catalog_keys
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import queues as queue_keys
from basaltmq.store.keys import streams as stream_keys
from basaltmq.store.salvage.losses import Gap
from basaltmq.store.salvage.reading import Row

DERIVED: Final = frozenset(
    {
        Family.DEFAULT,
        Family.OBJECT_NAMES,
        Family.CONTENT_REFS,
        Family.QUEUE_STATS,
        Family.LEASE_EXPIRY,
        Family.MESSAGE_EXPIRY,
        Family.TIMERS,
        Family.TRANSIENT,
        Family.DEDUP_EXPIRY,
        Family.TOPIC_GROUPS,
        Family.STREAM_INDEX,
        Family.STREAM_RECORD_INDEX,
        Family.BODY_PLACES,
        Family.BODY_FILES,
    }
)
"""Families that a repair rebuilds from others. The all-time totals in `queue_stats` restart at zero."""

SHOWN_MAX: Final = 20
"""Ids listed in one line. The repair report lists all ids."""

_BY_QUEUE: Final = {
    Family.MESSAGES: "messages",
    Family.DELAYED: "delayed messages",
    Family.LEASES: "leases",
    Family.DEDUP: "deduplication ids",
}
_BY_NAME: Final = {
    Family.QUEUES: "the configuration of queues",
    Family.STATE: "runtime settings",
    Family.DELETED_QUEUES: "marks of deleted queues",
    Family.CONSUMER_GROUPS: "consumer groups",
    Family.IMPORTS: "import runs",
    Family.API_KEYS: "API keys",
    Family.MQTT_SESSIONS: "MQTT sessions",
    Family.MQTT_RETAINED: "retained MQTT messages",
    Family.VERSION: "version and counter rows",
}


class Loss(msgspec.Struct, kw_only=True):
    """One loss in the report of a repair."""

    subject: str
    text: str
    family: str
    file: str = ""
    queues: list[str] = []
    """Queues that may miss messages."""
    ids: list[str] = []
    """Lost messages or objects, if known."""
    start: str = ""
    """The lost key range in hex: start <= key < end."""
    end: str | None = None

    def line(self) -> str:
        where = f" ({self.file})" if self.file else ""
        return f"{self.subject}: {self.text}{where}"


Rows = Callable[[Family], Iterator[Row]]


class Naming:
    """Describes gaps. `rows` reads the readable rows of a family."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._queues: list[str] | None = None

    def losses(self, gaps: Iterable[Gap]) -> list[Loss]:
        """Return the losses. Lost rows of one queue and file are combined."""
        found: list[Loss] = []
        rows: dict[tuple[str, str, str], Loss] = {}
        gaps = list(gaps)
        objects = self._object_names(gaps)
        topics = self._topics(gaps)
        for gap in gaps:
            family = BY_LABEL.get(gap.family)
            if family is None:
                text = f"rows of any family may be lost: {gap.what}"
                found.append(Loss(subject="table", text=text, family="", file=gap.file, end=None))
            elif family in DERIVED:
                continue
            elif gap.row is not None:
                self._add_row(rows, family, gap.row, gap.file, objects, topics)
            else:
                found.append(self._range(family, gap, objects, topics))
        for loss in rows.values():
            loss.text = _count_text(loss)
        return found + list(rows.values())

    def _add_row(
        self,
        rows: dict[tuple[str, str, str], Loss],
        family: Family,
        key: bytes,
        file: str,
        objects: dict[UUID, str],
        topics: dict[int, str],
    ) -> None:
        subject, what, queue = _row(family, key, objects, topics)
        loss = rows.get((family.label, subject, file))
        if loss is None:
            loss = rows[family.label, subject, file] = Loss(
                subject=subject, text="", family=family.label, file=file, queues=[queue] if queue else []
            )
        loss.ids.append(what)

    def _range(self, family: Family, gap: Gap, objects: dict[UUID, str], topics: dict[int, str]) -> Loss:
        loss = Loss(
            subject=f"family {family.label}",
            text="",
            family=family.label,
            file=gap.file,
            start=gap.start.hex(),
            end=None if gap.end is None else gap.end.hex(),
        )
        before = _neighbor(family, gap.preceding or gap.start, objects, topics) if gap.start else "the beginning"
        after = "the end" if gap.following is None else _neighbor(family, gap.following, objects, topics)
        if family in _BY_QUEUE:
            loss.queues = self._queues_in(gap)
            if len(loss.queues) == 1:
                loss.subject = f"queue {loss.queues[0]!r}"
            else:
                names = ", ".join(map(repr, loss.queues[:SHOWN_MAX])) or "no known queue"
                loss.subject = f"{len(loss.queues)} queues ({names})"
            loss.text = f"{_BY_QUEUE[family]} between {before} and {after} are lost"
        elif family is Family.MESSAGE_CONTENT:
            first, last = gap.start[:16].hex(), "the end" if gap.end is None else gap.end[:16].hex()
            loss.subject = "bodies of messages"
            loss.text = f"bodies with an id between {first} and {last} are lost"
        elif family is Family.CONFIGURED_OBJECTS:
            lost = [(object_id, name) for object_id, name in objects.items() if gap.covers(str(object_id).encode())]
            loss.ids = [str(object_id) for object_id, _ in lost]
            loss.subject = "objects"
            names = ", ".join(name for _, name in lost[:SHOWN_MAX]) or "their names are unknown"
            loss.text = f"objects between {before} and {after} are lost: {names}"
        else:
            what = _BY_NAME.get(family, "rows")
            loss.text = f"{what} between {before} and {after} are lost"
        return loss

    def _queues_in(self, gap: Gap) -> list[str]:
        """Return the queues whose rows may lie in a gap."""
        if self._queues is None:
            named = {queue_keys.decode_queue_key(key) for key, _ in self._rows(Family.QUEUES)}
            named |= {queue_keys.decode_queue_stats_key(key) for key, _ in self._rows(Family.QUEUE_STATS)}
            self._queues = sorted(named)
        found = []
        for name in self._queues:
            start, end = key_parts.prefix_range(key_parts.lp(name))
            assert end is not None, "a length-prefixed name is never all 0xff"
            if end > gap.start and (gap.end is None or start < gap.end):
                found.append(name)
        return found

    def _object_names(self, gaps: list[Gap]) -> dict[UUID, str]:
        """Return type and name of the objects in a gap, from the name index."""
        lost = [gap for gap in gaps if gap.family in (Family.CONFIGURED_OBJECTS.label, "")]
        found: dict[UUID, str] = {}
        if lost:
            for key, raw in self._rows(Family.OBJECT_NAMES):
                if len(raw) == 16 and any(gap.covers(str(UUID(bytes=raw)).encode()) for gap in lost):
                    _, kind, name = catalog_keys.decode_object_name_key(key)
                    found[UUID(bytes=raw)] = f"{kind} {name!r}"
        return found

    def _topics(self, gaps: list[Gap]) -> dict[int, str]:
        """Return topic and partition of every shard, if a gap affects shards."""
        if not any(gap.family in (Family.STREAM_RECORDS.label, Family.SHARDS.label) for gap in gaps):
            return {}
        return shard_topics(self._rows)


def shard_topics(rows: Rows) -> dict[int, str]:
    """Return topic and partition of every shard, as operators know them."""
    names = {raw: catalog_keys.decode_object_name_key(key)[2] for key, raw in rows(Family.OBJECT_NAMES)}
    found: dict[int, str] = {}
    for key, raw in rows(Family.SHARDS):
        if key.startswith(b"M"):
            topic, partition = stream_keys.decode_shard_name_key(key)
            found[int.from_bytes(raw, "big")] = f"topic {names.get(topic.bytes, str(topic))!r}[{partition}]"
    return found


def _row(family: Family, key: bytes, objects: dict[UUID, str], topics: dict[int, str]) -> tuple[str, str, str]:
    """Return the owner of a row, the row's name (such as a message id), and its queue (empty if it has none)."""
    try:
        if family is Family.MESSAGES:
            queue, _, _, message_id = queue_keys.decode_message_key(key)
            return f"queue {queue!r}", message_id.hex(), queue
        if family is Family.DELAYED:
            queue, _, _, _, message_id = queue_keys.decode_timed_message_key(key)
            return f"queue {queue!r}", message_id.hex(), queue
        if family is Family.MESSAGE_CONTENT:
            return "bodies of messages", queue_keys.decode_body_key(key).hex(), ""
        if family is Family.STREAM_RECORDS:
            shard, offset = stream_keys.decode_stream_record_key(key)
            return topics.get(shard, f"shard {shard}"), f"offset {offset}", ""
        if family is Family.CONFIGURED_OBJECTS:
            object_id = catalog_keys.decode_configured_key(key)
            return "objects", objects.get(object_id, str(object_id)), ""
        if family in _BY_NAME:
            return _BY_NAME[family], repr(key.decode()), ""
    except (BasaltError, UnicodeDecodeError):
        pass
    return f"family {family.label}", key.hex(), ""


def _neighbor(family: Family, key: bytes, objects: dict[UUID, str], topics: dict[int, str]) -> str:
    """Describe a row next to a gap."""
    subject, what, _ = _row(family, key, objects, topics)
    if family in (Family.MESSAGES, Family.DELAYED):
        return f"id {what} of {subject}"
    return f"{subject} {what}" if family is Family.STREAM_RECORDS else what


def _count_text(loss: Loss) -> str:
    noun = "messages" if loss.queues else "rows"
    count = f"{len(loss.ids)} {noun}" if len(loss.ids) > 1 else noun.removesuffix("s")
    return f"{count} lost: {listed(loss.ids)}"


def listed(ids: list[str]) -> str:
    """Return the first SHOWN_MAX ids, separated by commas, and the number of the others."""
    more = len(ids) - SHOWN_MAX
    return ", ".join(ids[:SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
