"""A report names losses by id, offset, range or bytes only."""

from __future__ import annotations

from typing import Any

import pytest
from tests.soak.census import Census, Frame, Held, Recorded
from tests.soak.corruption import is_named
from tests.soak.ledger import Label
from tests.soak.report import Report

LABEL = Label("p", 1)
HELD = Held("work", "ab" * 16, "messages", b"\x00\x04work-key")
RECORD = Recorded("k.plain", "topic-id", 2, 7, 15)
FRAME = Frame(10, 19, "0000", 500, "0.log", 500, 900)
CENSUS = Census({LABEL: [HELD]}, {("k.plain", 2, LABEL): RECORD}, {7: [FRAME]})
WORK = "/|work"
STREAM = "kafka|k.plain-2"


def loss(**given: Any) -> dict[str, Any]:
    return {"subject": "", "what": "", "family": "messages", "ids": [], "start": "", "end": None, **given}


@pytest.mark.parametrize(
    ("text", "losses", "is_said"),
    [
        ("messages are lost, damaged, in quarantine: 000009.sst", [], False),
        (f"queue 'work': row of message {HELD.id} is in quarantine", [], True),
        ("", [loss(ids=[HELD.id])], True),
        ("", [loss(ids=["cd" * 16])], False),
        ("", [loss(start=b"\x00\x04work".hex(), end=b"\x00\x04workz".hex())], True),
        ("", [loss(start=b"\x00\x04work".hex(), end=b"\x00\x04work".hex())], False),
        ("", [loss(family="bodies", start=b"\x00\x04work".hex(), end=None)], False),
        ("", [loss(subject="confirmed writes", what="000009.log is missing")], True),
        ("", [loss(subject="confirmed writes", what="000010.log is missing")], False),
        ("", [loss(subject="queue 'work'", what="000009.log: the last changes of 3 messages are lost")], False),
    ],
)
def test_report_names_a_message_by_id_range_or_file(text: str, losses: list[dict[str, Any]], is_said: bool) -> None:
    assert is_named(WORK, LABEL, CENSUS, Report("000009.log", text, losses)) is is_said


@pytest.mark.parametrize(
    ("text", "losses", "is_said"),
    [
        ("the log lost records of topic k.plain", [], False),
        ("lost: shard 7, offsets 10 to 19", [], True),
        ("lost: shard 8, offsets 10 to 19", [], False),
        ("shard 7 has lost offsets 16 to 19", [], False),
        ("/x/log/0000/0.log bytes 896 to 1000: reason", [], True),
        ("/x/log/0000/0.log bytes 900 to 1000: reason", [], False),
        ("/x/log/0000 ends at byte 500, but was durable up to byte 900: x", [], True),
        ("/x/log/0000 ends at byte 501, but was durable up to byte 900: x", [], False),
        ("", [loss(what="the shard of partition 2 and its records are lost", ids=["topic-id"])], True),
        ("", [loss(what="the shard of partition 1 and its records are lost", ids=["topic-id"])], False),
        ("", [loss(subject="confirmed writes", what="0.log is missing")], False),
    ],
)
def test_report_names_records_by_offset_bytes_or_partition(
    text: str, losses: list[dict[str, Any]], is_said: bool
) -> None:
    assert is_named(STREAM, LABEL, CENSUS, Report("0.log", text, losses)) is is_said


def test_report_does_not_name_a_message_without_a_row() -> None:
    assert not is_named(WORK, Label("p", 2), CENSUS, Report("x", "", [loss(subject="table", what="x")]))
