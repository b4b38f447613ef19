"""Offsets of topics as people and checkpoints see them.

    {"orders": {"0": 120, "1": 97}, "clicks": {"0": 5}}

is what Spark writes into its offset log and what `startingOffsets` and `endingOffsets` take, with Kafka's -2 for the
earliest and -1 for the latest. Partitions are numbers in here and text in JSON.

The start of a query's first batch is not in Spark's offset log: Spark asks for the initial offset again when it repeats
that batch after a crash, and `latest` would have moved on by then. So the first offset says of itself that it is one
(`@initial`), and the end of the first batch, which is in the log, carries where it began (`@from`). Whoever plans a
batch from an initial offset takes the beginning from its end.

`@topics` holds the id of each topic, so that a topic which was deleted and created again under its name is detected.
Offsets of checkpoints written before this field existed load without ids.
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
"""By topic and partition."""

Ids: TypeAlias = dict[str, str]
"""The id of each topic, by name."""

Json: TypeAlias = dict[str, object]


def parse_offsets(option: str, text: str) -> Offsets:
    """Offsets an option gives as JSON."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(
            f'{option} is "earliest", "latest" or JSON, and {text!r:.80} is not: {error}'
        ) from None
    return _checked(option, raw)


def to_json(offsets: Offsets, ids: Ids | None = None) -> Json:
    """Offsets as Spark keeps them."""
    told: Json = {
        topic: {str(number): at for number, at in sorted(of.items())} for topic, of in sorted(offsets.items())
    }
    if ids:
        told[TOPICS] = dict(sorted(ids.items()))
    return told


def from_json(raw: Json) -> Offsets:
    """Offsets as Spark gave them back."""
    return _checked("the offset in the checkpoint", {name: of for name, of in raw.items() if name not in RESERVED})


def ids_of(raw: Json) -> Ids:
    """Ids of topics in an offset; empty if an older version wrote it."""
    ids = raw.get(TOPICS, {})
    if not isinstance(ids, dict) or not all(isinstance(each, str) for pair in ids.items() for each in pair):
        raise InvalidArgumentError(f"the offset in the checkpoint gives ids by topic under {TOPICS}, not {ids!r:.120}")
    return ids


def initial(offsets: Offsets, ids: Ids | None = None) -> Json:
    """The offset before the first batch."""
    return to_json(offsets, ids) | {INITIAL: True}


def is_initial(start: Json) -> bool:
    return bool(start.get(INITIAL))


def end_of(start: Json, offsets: Offsets, ids: Ids | None = None) -> Json:
    """The end of a batch that begins at `start`."""
    end = to_json(offsets, ids)
    if start.get(INITIAL):
        end[FROM] = to_json(from_json(start), ids_of(start))
    return end


def begin_of(start: Json, end: Json) -> Json:
    """Where the batch from `start` to `end` begins."""
    origin = end.get(FROM)
    return origin if start.get(INITIAL) and isinstance(origin, dict) else start


def _checked(option: str, raw: object) -> Offsets:
    wrong = InvalidArgumentError(
        f'{option} gives partitions and offsets by topic, such as {{"orders": {{"0": 12}}}}, not {raw!r:.120}'
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
