"""`basalt store` on intact, damaged and missing stores."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Basalt

import basaltmq


@pytest.fixture
def filled(data: Path) -> Path:
    with basaltmq.open(data) as db:
        db.topic("orders").append([b"%d" % at for at in range(100)])
        db.topic("rocks", engine="rocksdb").append([b"%d" % at * 50 for at in range(100)])
    return data


@pytest.mark.spec("A10")
def test_info_and_properties_work_while_another_process_has_the_store_open(basalt: Basalt, filled: Path) -> None:
    with basaltmq.open(filled):
        text = basalt("store", "info").output
        assert text.startswith("store ")
        assert "stream_records" in text
        rows = json.loads(basalt("store", "info", "--json").output)
        assert rows[-1]["family"] == "all"
        assert rows[-1]["rows"] >= max(row["rows"] for row in rows[:-1])
        found = {row["property"] for row in json.loads(basalt("store", "properties", "--json").output)}
        assert "estimated-rows" in found
        assert "estimated-rows" in basalt("store", "properties", "--family", "stream_records").output


@pytest.mark.parametrize(
    "command", [("info",), ("properties",), ("compact",), ("backup", "x"), ("repair", "--accept-loss")]
)
def test_every_command_without_a_store_fails_and_creates_none(
    basalt: Basalt, data: Path, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "store_not_found" in basalt("store", *command, code=1).stderr
    assert not data.exists()


def test_an_unknown_family_is_named(basalt: Basalt, filled: Path) -> None:
    for command in ("properties", "compact"):
        result = basalt("store", command, "--family", "nonsense", code=1)
        assert "unknown_family" in result.stderr
        assert "stream_records" in result.stderr


@pytest.mark.spec("A10")
def test_a_store_is_backed_up_verified_and_restored_with_its_log(basalt: Basalt, filled: Path, tmp_path: Path) -> None:
    assert "check it with" in basalt("store", "backup", tmp_path / "copy").output
    assert "is intact" in basalt("store", "verify", tmp_path / "copy").output
    assert "is intact" in basalt("store", "verify").output
    basalt("store", "backup", tmp_path / "copy", code=1)
    assert "restored to" in basalt("store", "restore", tmp_path / "copy", tmp_path / "back").output
    with basaltmq.open(tmp_path / "back", create=False) as db:
        assert len(list(db.topic("orders", create=False).read())) == 100
        assert len(list(db.topic("rocks", create=False).read())) == 100


@pytest.mark.promise("P7")
def test_damage_is_named_and_sets_the_exit_code(basalt: Basalt, filled: Path, tmp_path: Path) -> None:
    basalt("store", "backup", tmp_path / "copy")
    table = next((tmp_path / "copy" / "kv").glob("*.sst"))
    # The copy shares its SST files with the store by hard links.
    raw = bytearray(table.read_bytes())
    raw[len(raw) // 2] ^= 1
    table.unlink()
    table.write_bytes(raw)
    result = basalt("store", "verify", tmp_path / "copy", code=2)
    assert table.name in result.stdout
    [fault] = json.loads(basalt("store", "verify", tmp_path / "copy", "--json", code=2).output)
    assert table.name in fault["fault"]
    assert "corruption" in basalt("store", "restore", tmp_path / "copy", tmp_path / "back", code=1).stderr
    assert not (tmp_path / "back").exists()


@pytest.mark.promise("P7")
def test_damage_in_the_log_is_found_by_verify(basalt: Basalt, filled: Path) -> None:
    segment = next((filled / "log" / "0000").glob("*.log"))
    with basaltmq.open(filled) as db:
        db.topic("orders").append(b"after")
    raw = bytearray(segment.read_bytes())
    raw[100] ^= 1
    segment.write_bytes(raw)
    assert segment.name in basalt("store", "verify", code=2).stdout


def test_repair_does_not_change_an_undamaged_store(basalt: Basalt, filled: Path) -> None:
    for consent in ((), ("--accept-loss",)):
        assert "nothing to repair" in basalt("store", "repair", *consent).output
    with basaltmq.open(filled, create=False) as db:
        assert len(list(db.topic("rocks", create=False).read())) == 100


@pytest.mark.promise("P7")
@pytest.mark.spec("A10")
def test_repairing_a_damaged_table_loses_and_names_the_messages_of_one_block(basalt: Basalt, data: Path) -> None:
    with basaltmq.open(data) as db:
        ids = [each.hex() for each in db.queue("orders").enqueue([os.urandom(200) for _ in range(600)])]
        db.queue("idle")
    table = max((data / "kv").glob("*.sst"), key=lambda each: each.stat().st_size)
    raw = bytearray(table.read_bytes())
    raw[len(raw) // 2] ^= 0x40
    table.write_bytes(raw)
    said = basalt("store", "verify", code=2).stdout
    assert table.name in said
    assert "queue 'orders': messages between id " in said
    reported = basalt("store", "repair", code=2)
    assert "would be lost" in reported.stdout
    assert "--accept-loss" in reported.stderr
    assert table.read_bytes() == raw, "nothing was changed"
    done = json.loads(basalt("store", "repair", "--accept-loss", "--json").stdout)
    assert any(row["kind"] == "lost" and "queue 'orders': counted 600 messages" in row["what"] for row in done)
    assert any(row.get("family") == "messages" and row["start"] < row["end"] for row in done)
    assert "is intact" in basalt("store", "verify").output
    assert "nothing to repair" in basalt("store", "repair", "--accept-loss").output
    assert (data / "quarantine" / "repair-1" / "kv" / table.name).read_bytes() == raw
    with basaltmq.open(data, create=False) as db:
        there = [each.id.hex() for each in db.queue("orders").peek(600)]
        assert 480 < len(there) < 600
        first = next(at for at, each in enumerate(ids) if each not in set(there))
        assert there == ids[:first] + ids[len(ids) - (len(there) - first) :], "one run is lost"
        for queue in db.queues():
            queue.enqueue(b"after")
            assert queue.lease(1)


def test_compacting_reports_sizes(basalt: Basalt, filled: Path) -> None:
    assert " bytes before, " in basalt("store", "compact").output
    assert " bytes before, " in basalt("store", "compact", "--family", "stream_records").output


def test_commands_that_write_need_exclusive_access(basalt: Basalt, filled: Path, tmp_path: Path) -> None:
    with basaltmq.open(filled):
        for command in (("compact",), ("backup", str(tmp_path / "copy")), ("repair", "--accept-loss"), ("verify",)):
            assert "store_locked" in basalt("store", *command, code=1).stderr


def test_a_directory_without_a_store_is_refused_by_name(basalt: Basalt, data: Path) -> None:
    data.mkdir()
    (data / "letter.txt").write_text("dear diary")
    for command in (("store", "info"), ("store", "verify"), ("topic", "list"), ("topic", "create", "x")):
        assert "not_a_store" in basalt(*command, code=1).stderr
    assert [each.name for each in data.iterdir()] == ["letter.txt"]


def test_help_and_version_are_printed(basalt: Basalt) -> None:
    assert basaltmq.__version__ in basalt("--version").output
    for words in (("--help",), ("store", "--help"), ("topic", "--help"), ("topic", "read", "-h")):
        assert "Usage:" in basalt(*words).output


@pytest.mark.promise("P7")
def test_verify_names_the_topic_of_a_damaged_frame(basalt: Basalt, data: Path) -> None:
    with basaltmq.open(data) as db:
        for at in range(3):
            db.topic("orders", partitions=2).append(b"%d" % at, partition=1)
    (segment,) = (data / "log").glob("*/*.log")
    raw = bytearray(segment.read_bytes())
    raw[-20] ^= 1
    segment.write_bytes(raw)
    (found,) = json.loads(basalt("store", "verify", "--json", code=2).stdout)
    assert "offsets 2 to 2 (topic 'orders'[1])" in found["fault"]
