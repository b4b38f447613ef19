"""The ledger finds every kind of problem."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.soak.checker import check_stream
from tests.soak.corruption import ACTIONS, FLIP, REMOVE, TRUNCATE, chosen_kinds, harm
from tests.soak.ledger import CANCELLED, CONFIRMED, SETTLED, SETTLING, TRIED, Found, Label, Ledger, check_order

PLACE = "/|work"


@pytest.fixture
def ledger() -> Ledger:
    """A ledger: 0 and 1 confirmed, 2 settled, 3 settling, 4 rolled back, 5 without a confirm."""
    made = Ledger()
    labels = made.next_label("p", 6)
    made.mark((PLACE,), labels, TRIED)
    made.mark((PLACE,), labels[:4], CONFIRMED)
    made.mark((PLACE,), labels[2:4], SETTLING)
    made.mark((PLACE,), labels[2:3], SETTLED)
    made.mark((PLACE,), labels[4:5], CANCELLED)
    return made


def label(number: int) -> Label:
    return Label("p", number)


@pytest.mark.parametrize("found", [(0, 1), (0, 1, 3), (0, 1, 3, 5)])
def test_allowed_messages_are_no_problem(ledger: Ledger, found: tuple[int, ...]) -> None:
    assert ledger.compare(PLACE, map(label, found)) == []
    assert ledger.problems == []


def test_a_lost_message_is_missing(ledger: Ledger) -> None:
    assert ledger.compare(PLACE, [label(1)]) == [label(0)]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((0, 1, 2), "came again after its ack was written"),
        ((0, 1, 4), "was rolled back"),
        ((0, 1, 1), "2 times"),
        ((0, 1, 9), "never sent"),
    ],
)
def test_forbidden_messages_are_problems(ledger: Ledger, found: tuple[int, ...], said: str) -> None:
    ledger.compare(PLACE, map(label, found))
    assert said in "\n".join(ledger.problems)


def test_wrong_order_gaps_and_partial_transactions_are_problems(ledger: Ledger) -> None:
    check_order(ledger, PLACE, [label(1), label(0)])
    check_stream(ledger, PLACE, [(0, label(0)), (2, label(1))])
    ledger.groups.append([Found(PLACE, label(0)), Found(PLACE, label(5))])
    ledger.check_groups(ledger.places())
    said = "\n".join(ledger.problems)
    assert "0 comes after 1" in said
    assert "offset 1 is missing" in said
    assert "in part: 1 of 2" in said


def test_body_of_any_size_carries_its_label() -> None:
    for size in (0, 10, 100_000):
        assert Label.of(Label("p-1", 12).body(size)) == Label("p-1", 12)


def test_changed_byte_in_a_body_is_detected() -> None:
    body = bytearray(Label("p-1", 12).body(300))
    body[200] ^= 1
    with pytest.raises(ValueError, match="was changed"):
        Label.of(bytes(body))


@pytest.mark.parametrize("action", ACTIONS)
def test_file_is_damaged_as_requested(tmp_path: Path, action: str) -> None:
    path = tmp_path / "file"
    before = b"content" * 10 + bytes(100)
    path.write_bytes(before)
    harm(path, action, random.Random(1))
    if action == REMOVE:
        assert not path.exists()
    else:
        after = path.read_bytes()
        assert len(after) < len(before) if action == TRUNCATE else len(after) == len(before)
        assert action != FLIP or sum(a != b for a, b in zip(after[:70], before[:70], strict=True)) == 1


def test_kinds_are_selected_by_name() -> None:
    assert "sst" in chosen_kinds("all")
    assert chosen_kinds("wal,blob") == ("wal", "blob")
    with pytest.raises(SystemExit, match="no kind 'nope'"):
        chosen_kinds("nope")
