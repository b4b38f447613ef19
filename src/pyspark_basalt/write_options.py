"""Options and columns of a write, checked before anything runs.

    value      binary or string; null is kept: a tombstone
    key        binary or string     hashes to a partition, as everywhere in Basalt
    topic      string               unless the option `topic` says it for all
    partition  int                  null: by the key, or in turns
    headers    array<struct<key:string,value:binary>>
    timestamp  timestamp            null or missing: when the record is staged

`offset` and `timestampType`, which a frame that was read has, are passed over: a topic gives its own. Any other column
is refused, because what is in it would be lost without a word.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final
from uuid import uuid4

import msgspec
from pyspark.sql.types import StructType

from basaltmq.errors import InvalidArgumentError
from basaltmq.streams.imports.imports import ONCE
from basaltmq.streams.imports.stage import check_run
from pyspark_basalt.connection import NAMES, Place, parse_place

_NAMES: Final = (*NAMES, "topic", "runId", "batchId", "checkpointLocation")
KNOWN: Final = {name.lower(): name for name in _NAMES}

_TEXT: Final = ("binary", "string")
_HEADERS: Final = ("array<struct<key:string,value:binary>>",)
COLUMNS: Final = {
    "value": _TEXT,
    "key": _TEXT,
    "topic": ("string",),
    "partition": ("int",),
    "headers": _HEADERS,
    "timestamp": ("timestamp", "timestamp_ntz"),
}
WRITE: Final = "write-"
"""A batch write's run at a broker, which is asked to forget it when it is done: its answer may have to be asked for
again."""
PASSED_OVER: Final = ("offset", "timestampType")


class WriteOptions(msgspec.Struct, frozen=True):
    """Where to write, and as what."""

    place: Place
    topic: str | None
    run: str
    """A batch write's own; a stream's is its query."""
    batch: int

    @property
    def is_only_one(self) -> bool:
        """A run of this write alone, of which nothing can come again once it is done."""
        return self.run.startswith((ONCE, WRITE))


def parse_write(options: Mapping[str, str], schema: StructType, *, is_streaming: bool) -> WriteOptions:
    """Write options, checked with the columns; InvalidArgumentError says what is wrong with which."""
    given = {name.lower(): value for name, value in options.items()}
    for name in given:
        if name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"; did you mean {KNOWN[near[0]]}?" if near else f"; known are {', '.join(_NAMES)}"
            raise InvalidArgumentError(f"the basalt sink has no option {name!r}{hint}")
    place = parse_place(given, "say where to write to")
    topic = given.get("topic")
    _check_columns(schema, topic)
    if is_streaming and ("runid" in given or "batchid" in given):
        raise InvalidArgumentError("a streaming write is its query's run; runId and batchId are for batch writes")
    if ("runid" in given) != ("batchid" in given):
        raise InvalidArgumentError("runId and batchId go together: a batch of that number is written once in that run")
    batch = given.get("batchid", "0")
    if not batch.isdecimal():
        raise InvalidArgumentError(f"batchId is a number from 0 on, not {batch!r:.80}")
    own = f"{ONCE if place.login is None else WRITE}{uuid4().hex}"
    run = check_run(given.get("runid", own))
    if "runid" in given and run.startswith((ONCE, WRITE)):
        raise InvalidArgumentError(
            f"runs that begin with {ONCE!r} or {WRITE!r} are not remembered; name it otherwise than {run!r}"
        )
    return WriteOptions(place, topic, run, int(batch))


def _check_columns(schema: StructType, topic: str | None) -> None:
    has = {field.name: field.dataType.simpleString() for field in schema.fields}
    unknown = [name for name in has if name not in COLUMNS and name not in PASSED_OVER]
    if unknown:
        raise InvalidArgumentError(
            f"a topic has no column {unknown[0]!r}; it has {', '.join(COLUMNS)}: put it into value, or drop it"
        )
    if "value" not in has:
        raise InvalidArgumentError("a write needs a column value, binary or string, such as to_json(struct(*))")
    if topic is None and "topic" not in has:
        raise InvalidArgumentError('say which topic to write to: .option("topic", "orders"), or a column topic')
    for name, kind in has.items():
        wanted = COLUMNS.get(name)
        if wanted is not None and kind not in wanted:
            raise InvalidArgumentError(f"the column {name} is {' or '.join(wanted)}, not {kind}; cast it")
