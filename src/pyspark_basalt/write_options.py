"""Options and columns of a write, checked before the query runs.

    value      binary or string; null is kept as a tombstone
    key        binary or string     selects the partition by its hash
    topic      string               unless the option `topic` applies to all rows
    partition  int                  null: by key, or round-robin
    headers    array<struct<key:string,value:binary>>
    timestamp  timestamp            null or missing: the time of staging

`offset` and `timestampType`, which a frame from a read has, are ignored. Any other column is refused, because its data
would be lost silently.
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
from pyspark_basalt.connection import NAMES, StoreLocation, parse_location

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
"""Prefix of a batch write's run at a broker. The run is deleted after the commit; until then the commit may be
repeated."""
IGNORED: Final = ("offset", "timestampType")


class WriteOptions(msgspec.Struct, frozen=True):
    location: StoreLocation
    topic: str | None
    run: str
    """Run of a batch write. A stream uses its query id."""
    batch: int

    @property
    def is_single_write(self) -> bool:
        """Whether the run belongs to this write alone, so that it cannot be repeated after the commit."""
        return self.run.startswith((ONCE, WRITE))


def parse_write(options: Mapping[str, str], schema: StructType, *, is_streaming: bool) -> WriteOptions:
    """Parse and check the options and columns of a write."""
    given = {name.lower(): value for name, value in options.items()}
    for name in given:
        if name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"; did you mean {KNOWN[near[0]]}?" if near else f"; known options are {', '.join(_NAMES)}"
            raise InvalidArgumentError(f"the basalt sink has no option {name!r}{hint}")
    location = parse_location(given, "say where to write to")
    topic = given.get("topic")
    _check_columns(schema, topic)
    if is_streaming and ("runid" in given or "batchid" in given):
        raise InvalidArgumentError("runId and batchId are for batch writes; a streaming write uses its query id")
    if ("runid" in given) != ("batchid" in given):
        raise InvalidArgumentError("give both runId and batchId: a batch number is written once per run")
    batch = given.get("batchid", "0")
    if not batch.isdecimal():
        raise InvalidArgumentError(f"batchId must be a number of at least 0, not {batch!r:.80}")
    default_run = f"{ONCE if location.login is None else WRITE}{uuid4().hex}"
    run = check_run(given.get("runid", default_run))
    if "runid" in given and run.startswith((ONCE, WRITE)):
        raise InvalidArgumentError(
            f"runs that begin with {ONCE!r} or {WRITE!r} are not recorded; use another name than {run!r}"
        )
    return WriteOptions(location, topic, run, int(batch))


def _check_columns(schema: StructType, topic: str | None) -> None:
    has = {field.name: field.dataType.simpleString() for field in schema.fields}
    unknown = [name for name in has if name not in COLUMNS and name not in IGNORED]
    if unknown:
        raise InvalidArgumentError(
            f"a topic has no column {unknown[0]!r}; it has {', '.join(COLUMNS)}: put it into value, or drop it"
        )
    if "value" not in has:
        raise InvalidArgumentError(
            "the column value is missing; it must be binary or string, such as to_json(struct(*))"
        )
    if topic is None and "topic" not in has:
        raise InvalidArgumentError('the topic is missing: set .option("topic", "orders"), or add a column topic')
    for name, kind in has.items():
        wanted = COLUMNS.get(name)
        if wanted is not None and kind not in wanted:
            raise InvalidArgumentError(f"the column {name} must be {' or '.join(wanted)}, not {kind}; cast it")
