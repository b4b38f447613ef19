"""Offsets of topics as JSON, in options and in Spark's checkpoints.

    {"orders": {"0": 120, "1": 97}, "clicks": {"0": 5}}

Spark's offset log, `startingOffsets` and `endingOffsets` use this form. As in Kafka, -2 means earliest and -1 latest.
Partitions are numbers in Python and strings in JSON.

Spark's offset log does not contain the start of the first batch. When Spark repeats that batch after a crash, it
requests the initial offset again, and `latest` may have moved. So the initial offset is marked (`@initial`), and the
end of the first batch, which is logged, contains its start (`@from`). The planner of a batch with an initial offset
takes the start from the end.

`@topics` contains the id of each topic, to detect a topic that was deleted and created again. Checkpoints of older
versions have no ids.
"""

from __future__ import annotations

import json
from typing import Final, TypeAlias

from basaltmq.errors import InvalidArgumentError

EARLIEST: Final = -2
LATEST: Final = -1

INITIAL: Final = "@initial"
FROM: Final = "@from"
TOPICS: Final = "@topics"
RESERVED: Final = frozenset((INITIAL, FROM, TOPICS))

Offsets: TypeAlias = dict[str, dict[int, int]]
"""Offset by topic and partition."""

Ids: TypeAlias = dict[str, str]
"""Topic id by name."""

Json: TypeAlias = dict[str, object]


def parse_offsets(option: str, text: str) -> Offsets:
    """Parse the JSON of an option."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(
            f'{option} must be "earliest", "latest" or JSON, not {text!r:.80}: {error}'
        ) from None
    return _checked(option, raw)


def to_json(offsets: Offsets, ids: Ids | None = None) -> Json:
    """Return offsets in the form of Spark's offset log."""
    entry: Json = {
        topic: {str(number): at for number, at in sorted(of.items())} for topic, of in sorted(offsets.items())
    }
    if ids:
        entry[TOPICS] = dict(sorted(ids.items()))
    return entry


def from_json(raw: Json) -> Offsets:
    """Return the offsets of an entry of Spark's offset log."""
    return _checked("the offset in the checkpoint", {name: of for name, of in raw.items() if name not in RESERVED})


def ids_of(raw: Json) -> Ids:
    """Return the topic ids of an entry. Empty if an older version wrote it."""
    ids = raw.get(TOPICS, {})
    if not isinstance(ids, dict) or not all(isinstance(each, str) for pair in ids.items() for each in pair):
        raise InvalidArgumentError(f"the offset in the checkpoint must have topic ids under {TOPICS}, not {ids!r:.120}")
    return ids


def initial(offsets: Offsets, ids: Ids | None = None) -> Json:
    """Return the offset before the first batch."""
    return to_json(offsets, ids) | {INITIAL: True}


def is_initial(start: Json) -> bool:
    return bool(start.get(INITIAL))


def end_of(start: Json, offsets: Offsets, ids: Ids | None = None) -> Json:
    """Return the end of a batch that begins at `start`."""
    end = to_json(offsets, ids)
    if start.get(INITIAL):
        end[FROM] = to_json(from_json(start), ids_of(start))
    return end


def begin_of(start: Json, end: Json) -> Json:
    """Return the begin of the batch from `start` to `end`."""
    origin = end.get(FROM)
    return origin if start.get(INITIAL) and isinstance(origin, dict) else start


def _checked(option: str, raw: object) -> Offsets:
    wrong = InvalidArgumentError(
        f'{option} must have partitions and offsets by topic, such as {{"orders": {{"0": 12}}}}, not {raw!r:.120}'
    )
    if not isinstance(raw, dict):
        raise wrong
    offsets: Offsets = {}
    for topic, partitions in raw.items():
        if not isinstance(partitions, dict):
            raise wrong
        of = offsets[topic] = {}
        for number, offset in partitions.items():
            if not str(number).isdecimal() or type(offset) is not int or offset < EARLIEST:
                raise wrong
            of[int(number)] = offset
    return offsets
