"""Options of the source, checked before the query runs.

Names and meanings are those of Spark's Kafka connector, without its `kafka.` settings. `path` or `server` gives the
location (connection.py). Unknown options are refused: a misspelt `endingOffset` would read too much. Options of the
Kafka connector without a meaning here are refused with an alternative.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from basaltmq.decoding import converter
from basaltmq.errors import InvalidArgumentError
from pyspark_basalt.connection import NAMES, StoreLocation, parse_location
from pyspark_basalt.offsets import EARLIEST, LATEST, Offsets, parse_offsets

PARTITION_BYTES: Final = 128 << 20
"""Default bytes per task: about a second of work, and enough tasks of a large topic for every core."""

TRIGGER_DELAY_MS: Final = 15 * 60_000
"""Default time for which `minOffsetsPerTrigger` may delay a batch, as in the Kafka connector."""

_READ_NAMES: Final = (
    *NAMES,
    "subscribe",
    "subscribePattern",
    "assign",
    "queue",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "commitGroup",
    "minPartitions",
    "maxRecordsPerPartition",
    "maxBytesPerPartition",
    "includeHeaders",
    "explodeEvents",
    "failOnDataLoss",
    "batchRows",
)
KNOWN: Final = {name.lower(): name for name in _READ_NAMES}

_AT_KAFKA: Final = {
    "groupidprefix": "a query reads without a group; commitGroup commits its progress to one",
    "kafka.group.id": "a query reads without a group; commitGroup commits its progress to one",
    "groupid": "a query reads without a group; commitGroup commits its progress to one",
    "kafka.bootstrap.servers": "use path, or server, the address of a broker's admin API",
    "fetchoffset.numretries": "use retryTimeoutMs, the time to wait for a broker",
    "fetchoffset.retryintervalms": "use retryTimeoutMs, the time to wait for a broker",
    "kafkaconsumer.polltimeoutms": "use retryTimeoutMs, the time to wait for a broker",
}
"""Options of the Kafka connector without a meaning here -> alternative."""


class Bound(msgspec.Struct, frozen=True):
    """One bound of a read: a position for all partitions, offsets by partition, or a time."""

    position: int = EARLIEST
    """For partitions that are in neither `offsets` nor `timestamps`."""
    offsets: Offsets = {}
    timestamp_ms: int | None = None
    timestamps: Offsets = {}
    must_match: bool = False
    """Whether a time after the last record is an error. Otherwise it means the end."""


class ReadOptions(msgspec.Struct, frozen=True):
    location: StoreLocation
    queue: str | None = None
    """Read messages of a queue instead of topics."""
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assign: dict[str, list[int]] | None = None
    start: Bound = Bound()
    end: Bound = Bound(position=LATEST)
    offsets_per_trigger_max: int | None = None
    offsets_per_trigger_min: int | None = None
    trigger_delay_ms_max: int = TRIGGER_DELAY_MS
    commit_group: str | None = None
    partitions_min: int | None = None
    partition_records_max: int | None = None
    partition_bytes_max: int = PARTITION_BYTES
    include_headers: bool = False
    explode_events: bool = False
    """The topic contains lifecycle events: one row per event, with other columns."""
    fail_on_data_loss: bool = True
    batch_rows: int = 16_384
    """Rows per Arrow batch: large enough to amortize its overhead, small enough to be in flight."""


def parse(options: Mapping[str, str], *, is_streaming: bool = False) -> ReadOptions:
    """Parse and check the options of a read."""
    given = {name.lower(): value for name, value in options.items()}
    for name in given:
        _check_known(name)
    location = parse_location(given, "say where the data is")
    which = [name for name in ("subscribe", "subscribepattern", "assign", "queue") if name in given]
    if len(which) != 1:
        raise InvalidArgumentError(
            "give exactly one of subscribe, subscribePattern, assign and queue, not "
            + (" and ".join(KNOWN[name] for name in which) or "none of them")
        )
    if "queue" in given:
        _check_queue(given)
    if not is_streaming:
        for name in ("maxoffsetspertrigger", "minoffsetspertrigger", "maxtriggerdelay", "commitgroup"):
            if name in given:
                raise InvalidArgumentError(f"{KNOWN[name]} is only for streaming queries")
    start = _bound(given, "starting", LATEST if is_streaming else EARLIEST)
    if is_streaming:
        for name in ("endingoffsets", "endingtimestamp", "endingoffsetsbytimestamp"):
            if name in given:
                raise InvalidArgumentError(f"{KNOWN[name]} is only for batch queries")
    return ReadOptions(
        location=location,
        queue=given.get("queue"),
        topics=_names(given.get("subscribe")),
        pattern=_pattern(given.get("subscribepattern")),
        assign=_assign(given.get("assign")),
        start=start,
        end=_bound(given, "ending", LATEST),
        offsets_per_trigger_max=_count(given, "maxoffsetspertrigger"),
        offsets_per_trigger_min=_count(given, "minoffsetspertrigger"),
        trigger_delay_ms_max=_delay_ms(given.get("maxtriggerdelay")),
        commit_group=_group(given.get("commitgroup")),
        partitions_min=_count(given, "minpartitions"),
        partition_records_max=_count(given, "maxrecordsperpartition"),
        partition_bytes_max=_count(given, "maxbytesperpartition") or PARTITION_BYTES,
        include_headers=_flag(given, "includeheaders", False),
        explode_events=_flag(given, "explodeevents", False),
        fail_on_data_loss=_flag(given, "failondataloss", True),
        batch_rows=_count(given, "batchrows") or 16_384,
    )


def _check_known(name: str) -> None:
    if name in KNOWN:
        return
    if name in _AT_KAFKA:
        raise InvalidArgumentError(f"the basalt source has no option {name!r}: {_AT_KAFKA[name]}")
    if name.startswith("kafka."):
        raise InvalidArgumentError(f"{name!r} is a setting of Kafka clients and has no effect here; remove it")
    near = difflib.get_close_matches(name, KNOWN, n=1)
    hint = f"; did you mean {KNOWN[near[0]]}?" if near else f"; known options are {', '.join(_READ_NAMES)}"
    raise InvalidArgumentError(f"the basalt source has no option {name!r}{hint}")


_FOR_TOPICS: Final = (
    "explodeevents",
    "maxoffsetspertrigger",
    "minoffsetspertrigger",
    "maxtriggerdelay",
    "commitgroup",
    "maxrecordsperpartition",
    "maxbytesperpartition",
    "startingoffsetsbytimestamp",
    "endingoffsetsbytimestamp",
    "startingoffsetsbytimestampstrategy",
)
"""Options without a meaning for a queue: its messages have a time and no offset."""


def _check_queue(given: Mapping[str, str]) -> None:
    if not given["queue"].strip():
        raise InvalidArgumentError("queue must be the name of a queue")
    for name in _FOR_TOPICS:
        if name in given:
            raise InvalidArgumentError(f"{KNOWN[name]} is only for topics; messages of a queue are read by time")
    for name in ("startingoffsets", "endingoffsets"):
        if given.get(name, "earliest").strip().lower() not in ("earliest", "latest"):
            raise InvalidArgumentError(
                f"{KNOWN[name]} of a queue must be earliest or latest; {name[: -len('offsets')]}Timestamp gives a time"
            )


def _bound(given: Mapping[str, str], side: str, position: int) -> Bound:
    strategy = given.get("startingoffsetsbytimestampstrategy", "error").strip().lower()
    if strategy not in ("error", "latest"):
        raise InvalidArgumentError(f"startingOffsetsByTimestampStrategy must be error or latest, not {strategy!r:.80}")
    must_match = side == "starting" and strategy == "error"
    names = [name for name in (f"{side}offsetsbytimestamp", f"{side}timestamp", f"{side}offsets") if name in given]
    if len(names) > 1:
        raise InvalidArgumentError(f"give one of {', '.join(KNOWN[name] for name in names)}, not several")
    if not names:
        return Bound(position=position)
    name, text = names[0], given[names[0]].strip()
    if name == f"{side}offsets":
        return _parse_position(KNOWN[name], text, position)
    if name == f"{side}timestamp":
        if not text.isdecimal():
            raise InvalidArgumentError(f"{KNOWN[name]} must be in milliseconds since 1970, not {text!r:.80}")
        return Bound(position=position, timestamp_ms=int(text), must_match=must_match)
    return Bound(position=position, timestamps=parse_offsets(KNOWN[name], text), must_match=must_match)


def _parse_position(option: str, text: str, position: int) -> Bound:
    if text.lower() == "earliest":
        if option == "endingOffsets":
            raise InvalidArgumentError("endingOffsets cannot be earliest: nothing would be read")
        return Bound(position=EARLIEST)
    if text.lower() == "latest":
        return Bound(position=LATEST)
    offsets = parse_offsets(option, text)
    if option == "endingOffsets" and any(at == EARLIEST for of in offsets.values() for at in of.values()):
        raise InvalidArgumentError("endingOffsets cannot be earliest (-2) for any partition")
    return Bound(position=position, offsets=offsets)


def _names(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InvalidArgumentError("subscribe must contain one or more topic names, separated by commas")
    return names


def _pattern(text: str | None) -> str | None:
    if text is not None:
        try:
            re.compile(text)
        except re.error as error:
            raise InvalidArgumentError(f"subscribePattern {text!r:.80} is not a regular expression: {error}") from None
    return text


_partitions: Final = converter(dict[str, list[int]])


def _assign(text: str | None) -> dict[str, list[int]] | None:
    if text is None:
        return None
    try:
        return _partitions(json.loads(text))
    except (ValueError, msgspec.ValidationError) as error:
        raise InvalidArgumentError(
            f'assign must contain partitions by topic, such as {{"orders": [0, 1]}}, not {text!r:.80} ({error})'
        ) from None


def _count(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise InvalidArgumentError(f"{KNOWN[name]} must be a number above 0, not {text!r:.80}")
    return int(text)


_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def _delay_ms(text: str | None) -> int:
    if text is None:
        return TRIGGER_DELAY_MS
    found = re.fullmatch(r"(\d{1,12})\s*(ms|s|m|h|d)", text.strip().lower())
    if found is None:
        raise InvalidArgumentError(f"maxTriggerDelay must be a time such as 15m, 30s or 500ms, not {text!r:.80}")
    return int(found[1]) * _UNITS_MS[found[2]]


def _group(text: str | None) -> str | None:
    if text is not None and not text.strip():
        raise InvalidArgumentError("commitGroup must be the name of a consumer group")
    return text


def _flag(given: Mapping[str, str], name: str, default: bool) -> bool:
    text = given.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        raise InvalidArgumentError(f"{KNOWN[name]} must be true or false, not {text!r:.80}")
    return text == "true"
