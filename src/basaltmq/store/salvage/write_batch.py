"""Names the rows of a damaged write batch in a WAL file.

The content is unverified, because the record did not match its checksum. A key is named only if it can be decoded.
"""

from __future__ import annotations

from collections.abc import Mapping

from basaltmq.errors import BasaltError
from basaltmq.store.families import BY_LABEL, Family
from basaltmq.store.integrity.wal import DamagedRecord
from basaltmq.store.integrity.wal_batch import changes
from basaltmq.store.keys import queues as queue_keys
from basaltmq.store.salvage.naming import Loss, listed


class BatchNaming:
    """Describes damaged WAL records. `families` maps numbers to labels."""

    def __init__(self, families: Mapping[int, str]) -> None:
        self._families = families

    def losses(self, file: str, record: DamagedRecord) -> list[Loss]:
        """Return the losses of a damaged record, by queue."""
        ids: dict[str, list[str]] = {}
        others: dict[str, int] = {}
        for change in changes(record.payload):
            label = self._families.get(change.family, "")
            family = BY_LABEL.get(label)
            if family in (Family.MESSAGES, Family.DELAYED):
                try:
                    if family is Family.MESSAGES:
                        queue, _, _, message_id = queue_keys.decode_message_key(change.key)
                    else:
                        queue, _, _, _, message_id = queue_keys.decode_timed_message_key(change.key)
                except (BasaltError, UnicodeDecodeError):
                    continue
                ids.setdefault(queue, []).append(message_id.hex())
            elif label:
                others[label] = others.get(label, 0) + 1
        where = f"bytes {record.offset} to {record.end} of {file}"
        text = f"{where} hold no complete record"
        if others:
            text += "; changes of rows in " + ", ".join(f"{label} ({count})" for label, count in sorted(others.items()))
        found = [Loss(subject="writes", text=text, family="", file=file, end=None)]
        for queue, named in sorted(ids.items()):
            found.append(
                Loss(
                    subject=f"queue {queue!r}",
                    text=f"the last changes of {len(named)} messages are lost: {listed(named)}",
                    family=Family.MESSAGES.label,
                    file=file,
                    queues=[queue],
                    ids=named,
                )
            )
        return found
