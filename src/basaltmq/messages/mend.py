"""The rows of the message store brought in line with each other, after a repair that could not read all of them.

A message that lacks a part of its content is removed with its entries; entries of a message that is gone are removed;
content of no message is removed. Memory is about 100 bytes per message that has content.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.messages.metadata import COMPLETE, decode_metadata
from basaltmq.messages.sequence import NEXT_MESSAGE_ID, encode_next_id
from basaltmq.messages.store import CONTENT, FAMILIES, VERSION
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import queues as keys
from basaltmq.store.salvage.losses import Losses
from basaltmq.store.salvage.naming import SHOWN_MAX, Loss
from basaltmq.store.versions import put_version, read_version

BATCH_ROWS: Final = 1000
"""Rows changed in one write."""


def mend_messages(store: Store, losses: Losses) -> list[Loss]:
    """Bring the rows of the message store in line; what that cost."""
    if all(next(iter(store.scan(family)), None) is None for family in FAMILIES):
        return []
    batch = _Batches(store)
    wanted, last_id = _messages(store)
    chunks: Counter[int] = Counter()
    for key, _ in store.scan(Family.MESSAGE_CONTENT):
        message_id, _ = keys.decode_content_key(key)
        last_id = max(last_id, message_id)
        chunks[message_id] += 1
        if message_id not in wanted:
            batch.delete(Family.MESSAGE_CONTENT, key)
    lost = {each for each, count in wanted.items() if count and chunks[each] != count}
    for message_id in lost:
        batch.delete(Family.MESSAGE_METADATA, keys.metadata_key(message_id))
        for key, _ in store.scan(Family.MESSAGE_CONTENT, *keys.prefix_range(keys.content_prefix(message_id))):
            batch.delete(Family.MESSAGE_CONTENT, key)
    entries: dict[str, list[str]] = {}
    for key, _ in store.scan(Family.QUEUE_ENTRIES):
        queue_id, message_id = keys.decode_queue_entry_key(key)
        last_id = max(last_id, message_id)
        if message_id in lost or message_id not in wanted:
            batch.delete(Family.QUEUE_ENTRIES, key)
            entries.setdefault(str(queue_id), []).append(str(message_id))
    _version(store, losses, batch, last_id)
    batch.flush()
    found = [_loss(f"queue {queue}", ids) for queue, ids in sorted(entries.items())]
    alone = sorted(lost - {int(each) for ids in entries.values() for each in ids})
    if alone:
        found.append(_loss("message store", [str(each) for each in alone]))
    return found


def _loss(subject: str, ids: list[str]) -> Loss:
    more = f" and {len(ids) - SHOWN_MAX} more" if len(ids) > SHOWN_MAX else ""
    text = f"{len(ids)} messages removed, because they are not whole: {', '.join(ids[:SHOWN_MAX])}{more}"
    return Loss(subject=subject, text=text, family=Family.QUEUE_ENTRIES.label, ids=ids)


def _messages(store: Store) -> tuple[dict[int, int], int]:
    """How many chunks each message is to have (0: any), and the highest id."""
    wanted: dict[int, int] = {}
    last_id = 0
    for key, raw in store.scan(Family.MESSAGE_METADATA):
        message_id = keys.decode_metadata_key(key)
        last_id = max(last_id, message_id)
        try:
            row = decode_metadata(message_id, raw)
        except CorruptionError:
            # Recovery puts it aside.
            wanted[message_id] = 0
            continue
        wanted[message_id] = row.chunks if row.state == COMPLETE else 0
    return wanted, last_id


def _version(store: Store, losses: Losses, batch: _Batches, last_id: int) -> None:
    if losses.hit(Family.VERSION) and read_version(store, CONTENT) is None:
        put_version(batch.batch, CONTENT, VERSION)
    raw = store.get(Family.VERSION, NEXT_MESSAGE_ID)
    if int.from_bytes(raw or b"", "big") <= last_id:
        batch.batch.put(Family.VERSION, NEXT_MESSAGE_ID, encode_next_id(last_id + 1))


class _Batches:
    """Deletes rows, many at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.batch = Batch()

    def delete(self, family: Family, key: bytes) -> None:
        self.batch.delete(family, key)
        if len(self.batch) >= BATCH_ROWS:
            self.flush()

    def flush(self) -> None:
        if len(self.batch):
            self._store.write(self.batch)
            self.batch = Batch()
