"""Queue configurations: checks and row codec."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.durability import Durability
from basaltmq.errors import CorruptionError, InvalidConfigError
from basaltmq.queues.config import (
    DURATION_MS_MAX,
    SCRIPT_BYTES_MAX,
    Overflow,
    QueueConfig,
    decode_config,
    encode_config,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
MS = st.none() | st.integers(1, DURATION_MS_MAX)
COUNT = st.none() | st.integers(0, (1 << 63) - 1)
CONFIGS = st.builds(
    QueueConfig,
    name=NAMES,
    on_enqueue_script=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
    visibility_timeout_ms=st.integers(1, DURATION_MS_MAX),
    dead_letter_queue=NAMES.map("dead.".__add__),
    attempts_max=st.none() | st.integers(1, (1 << 32) - 1),
    ttl_ms=MS,
    length_max=COUNT,
    bytes_max=COUNT,
    overflow=st.sampled_from(Overflow),
    expires_ms=MS,
    priorities_max=st.integers(0, 255),
    durability=st.sampled_from(Durability),
)


@pytest.mark.spec("C4", "E7")
@given(CONFIGS)
def test_config_round_trips(config: QueueConfig) -> None:
    assert decode_config(config.name, encode_config(config)) == config


@pytest.mark.spec("C4")
@given(CONFIGS)
def test_truncated_config_row_is_reported_as_damaged(config: QueueConfig) -> None:
    row = encode_config(config)
    for size in range(len(row)):
        with pytest.raises(CorruptionError, match="configuration of queue"):
            decode_config(config.name, row[:size])


@pytest.mark.spec("C4")
@given(st.binary(max_size=40))
def test_malformed_config_row_is_reported_as_damaged(row: bytes) -> None:
    with pytest.raises(CorruptionError):
        decode_config("q", row)
    with pytest.raises(CorruptionError):
        decode_config("q", b"\x02" + row)


@pytest.mark.spec("C4")
@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""},
        {"name": "x" * 256},
        {"name": 5},
        {"dead_letter_queue": "q"},
        {"dead_letter_queue": ""},
        {"visibility_timeout_ms": 0},
        {"visibility_timeout_ms": DURATION_MS_MAX + 1},
        {"visibility_timeout_ms": "1"},
        {"attempts_max": 0},
        {"ttl_ms": -1},
        {"length_max": -1},
        {"bytes_max": 1.5},
        {"expires_ms": 0},
        {"priorities_max": 256},
        {"overflow": "drop-head"},
        {"durability": None},
        {"overflow": Overflow.REJECT_PUBLISH_DEAD_LETTER},
        {"on_enqueue_script": "x" * (SCRIPT_BYTES_MAX + 1)},
        {"on_failure_script": b"bytes"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_invalid_config_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        QueueConfig(**{"name": "q", **fields})
    assert len(str(refused.value)) < 400


@pytest.mark.spec("C4")
def test_config_row_of_another_queue_or_with_unknown_field_is_reported() -> None:
    with pytest.raises(CorruptionError, match="contains the name 'q'"):
        decode_config("other", encode_config(QueueConfig(name="q")))
    with pytest.raises(CorruptionError, match="colour"):
        decode_config("q", b"\x02" + msgspec.msgpack.encode({"name": "q", "colour": "red"}))
    with pytest.raises(CorruptionError, match="damaged"):
        decode_config("q", b"\x02" + msgspec.msgpack.encode({"name": "q", "ttl_ms": -5}))
