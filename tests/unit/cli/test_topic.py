"""`basalt topic`: every command, with good input and bad."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.unit.cli.conftest import Basalt

import basaltmq
from basaltmq.cli import line_batches as lines_of_input
from basaltmq.cli.main import main
from basaltmq.cli.topic import input as topic_input
from basaltmq.log.batches.record import Record
from basaltmq.streams.view import StreamView


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_topic_is_created_listed_described_and_deleted(basalt: Basalt) -> None:
    basalt("topic", "create", "t", "--engine", "memory")
    basalt("topic", "create", "orders", "--partitions", "3", "--retention-records", "100", "--compact")
    basalt("topic", "create", "quick", "--durability", "written", "--engine", "rocksdb", "--retention-ms", "5")
    rows = json.loads(basalt("topic", "list", "--json").output)
    assert [(row["topic"], row["engine"], row["partitions"], row["durability"]) for row in rows] == [
        ("orders", "segment", 3, "synced"),
        ("quick", "rocksdb", 1, "written"),
        ("t", "memory", 1, "memory"),
    ]
    assert [row["topic"] for row in json.loads(basalt("topic", "list", "--after", "orders", "--json").output)] == [
        "quick",
        "t",
    ]
    assert "quick" not in basalt("topic", "list", "--limit", "1").output
    [reported] = json.loads(basalt("topic", "describe", "orders", "--json").output)
    assert reported["settings"]["retention_records"] == 100
    assert [row["partition"] for row in reported["partitions"]] == [0, 1, 2]
    text = basalt("topic", "describe", "orders").output
    assert "compact: True" in text
    assert "partition  first  end" in text
    assert basalt("topic", "delete", "orders", "--yes").output == "topic orders deleted\n"
    basalt("topic", "describe", "orders", code=1)


def test_the_next_command_is_quoted_for_the_shell(basalt: Basalt) -> None:
    assert "basalt topic append 'my orders'" in basalt("topic", "create", "my orders").output
    assert "basalt queue enqueue 'my jobs'" in basalt("queue", "create", "my jobs").output


def test_listing_an_empty_store_prints_the_next_command(basalt: Basalt, data: Path) -> None:
    basaltmq.open(data).close()
    assert basalt("topic", "list").output == "no topics; create one with: basalt topic create NAME\n"
    assert json.loads(basalt("topic", "list", "--json").output) == []
    assert basalt("topic", "groups").output == "no group has committed an offset\n"


def test_deleting_asks_for_confirmation(basalt: Basalt, data: Path) -> None:
    basalt("topic", "create", "orders")
    refused = CliRunner().invoke(main, ["--data-dir", str(data), "topic", "delete", "orders"], input="n\n")
    assert refused.exit_code == 1
    assert "Aborted" in refused.stderr
    assert "orders" in basalt("topic", "list").output
    result = basalt("topic", "delete", "orders", stdin="y\n")
    assert result.output.endswith("topic orders deleted\n")
    assert "topic_not_found" in basalt("topic", "delete", "orders", "--yes", code=1).stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("describe", "nope"), "topic_not_found"),
        (("read", "nope"), "topic_not_found"),
        (("append", "nope"), "topic_not_found"),
        (("migrate", "nope", "rocksdb"), "topic_not_found"),
        (("create", "orders"), "topic_already_exists"),
        (("create", "x", "--partitions", "0"), "invalid_config"),
        (("create", "x", "--engine", "memory", "--durability", "synced"), "invalid_config"),
        (("create", ""), "invalid_argument"),
        (("read", "orders", "--partition", "9"), "no partition 9"),
        (("groups", "nobody"), "group_not_found"),
        (("groups", "nobody", "--delete"), "group_not_found"),
        (("groups", "g", "--reset", "99", "--topic", "orders"), "offset_out_of_range"),
        (("migrate", "orders", "segment"), "already"),
    ],
)
def test_errors_are_one_line_with_an_exit_code(basalt: Basalt, words: tuple[str, ...], said: str) -> None:
    basalt("topic", "create", "orders")
    assert said in basalt("topic", *words, code=1).stderr


@pytest.mark.parametrize(
    "words",
    [
        ("create",),
        ("create", "x", "--engine", "paper"),
        ("create", "x", "--durability", "hopeful"),
        ("read", "orders", "--from", "yesterday"),
        ("read", "orders", "--limit", "-1"),
        ("groups", "--delete"),
        ("groups", "g", "--reset", "earliest"),
        ("groups", "g", "--reset", "sometime", "--topic", "orders"),
    ],
)
def test_invalid_usage_is_reported_as_a_usage_error(basalt: Basalt, words: tuple[str, ...]) -> None:
    basalt("topic", "create", "orders")
    assert "Usage:" in basalt("topic", *words, code=2).stderr


def test_reading_without_a_store_fails_and_creates_none(basalt: Basalt, data: Path) -> None:
    for words in (("list",), ("read", "x"), ("append", "x"), ("groups",), ("delete", "x", "--yes")):
        assert "store_not_found" in basalt("topic", *words, code=1).stderr
    assert not data.exists()


def test_json_lines_round_trip(basalt: Basalt) -> None:
    basalt("topic", "create", "orders")
    sent: list[dict[str, Any]] = [
        {"value": "plain"},
        {"value": "ünïcode", "key": "k", "headers": {"h": "1"}, "tags": ["red", "blue"]},
        {"value_base64": "/wA=", "key_base64": "gA==", "headers_base64": {"b": "/w=="}, "tags_base64": ["/w=="]},
        {"value": "", "timestamp_ms": 5, "expire_at_ms": 4_000_000_000_000},
    ]
    text = "\n".join(json.dumps(line) for line in sent) + "\n\n"
    assert "4 records appended to orders" in basalt("topic", "append", "orders", stdin=text).stderr
    got = lines(basalt("topic", "read", "orders").stdout)
    for offset, (line, expected) in enumerate(zip(got, sent, strict=True)):
        assert (line.pop("topic"), line.pop("partition"), line.pop("offset")) == ("orders", 0, offset)
        if "timestamp_ms" not in expected:
            assert line.pop("timestamp_ms") > 1_600_000_000_000
        assert line == expected
    # The output of `read` can be appended unchanged.
    basalt("topic", "create", "copy")
    basalt("topic", "append", "copy", stdin=basalt("topic", "read", "orders").stdout)
    again = lines(basalt("topic", "read", "copy").stdout)
    assert [line | {"topic": "orders"} for line in again] == lines(basalt("topic", "read", "orders").stdout)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "line 3"),
        ('{"key": "k"}', "line 3: a record needs value or value_base64"),
        ('{"value": "a", "value_base64": "YQ=="}', "line 3: give value or value_base64, not both"),
        ('{"value_base64": "%%%"}', "line 3: value_base64"),
        ('{"value": "a", "tags_base64": ["é"]}', "line 3: tags_base64"),
        ('{"value": "a", "colour": "red"}', "line 3"),
        ('{"value": 7}', "line 3"),
        ('["value"]', "line 3"),
    ],
)
def test_an_invalid_line_is_named_and_its_batch_is_not_appended(basalt: Basalt, line: str, said: str) -> None:
    basalt("topic", "create", "orders")
    result = basalt("topic", "append", "orders", stdin=f'{{"value": "ok"}}\n\n{line}\n', code=1)
    assert said in result.stderr
    assert "0 records appended" in result.stderr
    assert basalt("topic", "read", "orders").stdout == ""


def test_batches_before_an_invalid_line_are_appended_and_counted(
    basalt: Basalt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_input, "APPEND_RECORDS", 2)
    basalt("topic", "create", "orders")
    result = basalt("topic", "append", "orders", "--raw", "--file", "-", stdin="a\nb\nc\n")
    assert "3 records appended" in result.stderr
    text = '{"value": "1"}\n{"value": "2"}\n{"value": "3"}\nbad\n'
    assert "2 records appended" in basalt("topic", "append", "orders", stdin=text, code=1).stderr
    assert basalt("topic", "read", "orders", "--raw").stdout == "a\nb\nc\n1\n2\n"
    monkeypatch.setattr(lines_of_input, "LINE_BYTES_MAX", 10)
    result = basalt("topic", "append", "orders", "--raw", stdin="short\nfar too long a line\n", code=1)
    assert "line 2 is longer than 10 bytes" in result.stderr


def test_append_reads_raw_lines_keys_partitions_and_files(basalt: Basalt, tmp_path: Path) -> None:
    basalt("topic", "create", "orders", "--partitions", "4")
    (tmp_path / "in").write_bytes(b"one\r\n\xff\xfe\ntwo")
    basalt("topic", "append", "orders", "--raw", "--partition", "2", "--key", "k", "--file", tmp_path / "in")
    got = lines(basalt("topic", "read", "orders", "--partition", "2").stdout)
    assert [line.get("value") for line in got] == ["one", None, "two"]
    assert got[1]["value_base64"] == base64.b64encode(b"\xff\xfe").decode()
    assert {line["key"] for line in got} == {"k"}
    assert basalt("topic", "read", "orders", "--partition", "0").stdout == ""
    basalt("topic", "append", "orders", "--durability", "written", stdin='{"value": "x", "key": "own"}')
    assert lines(basalt("topic", "read", "orders", "--key", "own").stdout)[0]["value"] == "x"
    assert (
        "invalid_argument"
        in basalt("topic", "append", "orders", "--partition", "9", stdin='{"value": "x"}', code=1).stderr
    )


def test_read_selects_by_range_key_tag_and_time(basalt: Basalt, data: Path) -> None:
    with basaltmq.open(data) as db:
        topic = db.topic("orders")
        for at in range(10):
            topic.append(b"%d" % at, key=b"k%d" % (at % 2), tags=[b"t%d" % (at % 3)], timestamp_ms=1000 + at)
        topic.delete_before(0, 2)

    def read(*words: str) -> list[int]:
        return [int(line) for line in basalt("topic", "read", "orders", "--raw", *words).stdout.split()]

    assert read() == list(range(2, 10))
    assert read("--from", "7") == [7, 8, 9]
    assert read("--from", "latest") == []
    assert read("--limit", "3") == [2, 3, 4]
    assert read("--limit", "0") == []
    assert read("--key", "k1") == [3, 5, 7, 9]
    assert read("--tag", "t0", "--limit", "2") == [3, 6]
    assert read("--since-ms", "1006") == [6, 7, 8, 9]
    result = basalt("topic", "read", "orders", "--from", "1", code=1)
    assert "offset_out_of_range" in result.stderr
    assert "offsets 2 to 10 are available" in result.stderr
    assert "not both" in basalt("topic", "read", "orders", "--key", "a", "--tag", "b", code=1).stderr


def test_following_prints_records_of_another_process_up_to_its_count(basalt: Basalt, data: Path) -> None:
    with basaltmq.open(data) as db:
        topic = db.topic("orders")
        topic.append(b"before")
        found: list[str] = []

        def follow() -> None:
            found.append(basalt("topic", "read", "orders", "--follow", "--raw", "--limit", "4").stdout)

        following = threading.Thread(target=follow)
        following.start()
        for at in range(3):
            topic.append(b"%d" % at)
        following.join(60)
    assert found == ["before\n0\n1\n2\n"]


def test_a_follower_reports_records_deleted_by_retention(
    basalt: Basalt, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with basaltmq.open(data) as db:
        topic = db.topic("orders")
        topic.append(b"first")
        real = StreamView.wait
        waits: list[float | None] = []

        def wait(self: StreamView, timeout_s: float | None) -> bool:
            if not waits:
                topic.append([b"%d" % at for at in range(5)])
                topic.delete_before(0, 4)
                self.refresh()
            waits.append(timeout_s)
            return real(self, timeout_s)

        monkeypatch.setattr(StreamView, "wait", wait)
        result = basalt("topic", "read", "orders", "--follow", "--raw", "--limit", "3")
    assert result.stdout == "first\n3\n4\n"
    assert "offsets 1 to 3 of partition 0 were deleted by retention" in result.stderr


def test_deleting_a_topic_ends_its_followers_with_an_error(
    basalt: Basalt, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with basaltmq.open(data) as db:
        db.topic("orders").append(b"first")

        def wait(self: StreamView, timeout_s: float | None) -> bool:
            db.delete_topic("orders")
            self.refresh()
            return True

        monkeypatch.setattr(StreamView, "wait", wait)
        assert "topic_not_found" in basalt("topic", "read", "orders", "--follow", code=1).stderr


def test_ctrl_c_ends_a_follower_without_a_traceback(
    basalt: Basalt, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with basaltmq.open(data) as db:
        db.topic("orders").append(b"first")

    def wait(self: StreamView, timeout_s: float | None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(StreamView, "wait", wait)
    assert basalt("topic", "read", "orders", "--follow", "--raw").stdout == "first\n"


def test_commands_that_write_need_exclusive_access_and_those_that_read_do_not(basalt: Basalt, data: Path) -> None:
    with basaltmq.open(data) as db:
        db.topic("orders").append(b"one")
        assert "orders" in basalt("topic", "list").output
        assert basalt("topic", "read", "orders", "--raw").stdout == "one\n"
        for words in (("append", "orders"), ("create", "x"), ("delete", "orders", "--yes")):
            result = basalt("topic", *words, stdin='{"value": "x"}', code=1)
            assert "store_locked" in result.stderr
            assert "a retry may succeed" in result.stderr


def test_groups_are_listed_described_moved_and_deleted(basalt: Basalt, data: Path) -> None:
    with basaltmq.open(data) as db:
        topic = db.topic("orders", partitions=2)
        for at in range(10):
            topic.append(b"%d" % at, partition=at % 2)
        with topic.consume("billing", wait=0, batch=3) as consumer:
            consumer.poll()
    assert json.loads(basalt("topic", "groups", "--json").output) == [{"group": "billing"}]
    rows = json.loads(basalt("topic", "groups", "billing", "--json").output)
    assert [(row["committed"], row["lag"]) for row in rows] == [(3, 2)]
    moved = json.loads(basalt("topic", "groups", "billing", "--topic", "orders", "--reset", "latest", "--json").output)
    assert moved == [{"partition": 0, "offset": 5}, {"partition": 1, "offset": 5}]
    basalt("topic", "groups", "billing", "--topic", "orders", "--reset", "2", "--partition", "1")
    rows = json.loads(basalt("topic", "groups", "billing", "--json").output)
    assert [(row["partition"], row["committed"], row["lag"]) for row in rows] == [(0, 5, 0), (1, 2, 3)]
    assert basalt("topic", "groups", "billing", "--delete").output == "group billing deleted\n"
    assert json.loads(basalt("topic", "groups", "--json").output) == []


@pytest.mark.spec("D5")
def test_a_topic_moves_between_engines_with_its_records(basalt: Basalt) -> None:
    basalt("topic", "create", "orders")
    basalt("topic", "append", "orders", "--raw", stdin="a\nb\nc\n")
    assert "now uses the rocksdb engine" in basalt("topic", "migrate", "orders", "rocksdb").output
    assert json.loads(basalt("topic", "list", "--json").output)[0]["engine"] == "rocksdb"
    assert basalt("topic", "read", "orders", "--raw").stdout == "a\nb\nc\n"
    basalt("topic", "migrate", "orders", "segment")
    assert basalt("topic", "read", "orders", "--raw").stdout == "a\nb\nc\n"


@pytest.mark.spec("D5")
def test_metadata_is_exported_and_imported(basalt: Basalt, data: Path, tmp_path: Path) -> None:
    with basaltmq.open(data) as db:
        topic = db.topic("orders", partitions=2, retention_records=50)
        topic.append([Record(b"%d" % at, b"k%d" % at) for at in range(10)])
        list(topic.consume("billing", wait=0))
        db.topic("other")
    export = tmp_path / "export"
    basalt("topic", "export", export)
    assert basalt("topic", "export").stdout_bytes == export.read_bytes()
    other = ["--data-dir", str(tmp_path / "other"), "topic"]
    result = CliRunner().invoke(main, [*other, "import", str(export)])
    assert result.exit_code == 0
    assert result.stdout == "2 topics created, 2 offsets of groups set\n"
    result = CliRunner().invoke(main, [*other, "import"], input=export.read_bytes())
    assert result.stdout.startswith("0 topics created")
    assert "skipped existing topics: orders, other" in result.stderr
    with StreamView.open(tmp_path / "other") as view:
        assert view.topic("orders").config.retention_records == 50
        assert [row.lag for row in view.lag("billing")] == [0, 0]
    damaged = export.read_bytes().replace(b'"partitions":2', b'"partitions":"two"')
    result = CliRunner().invoke(main, ["--data-dir", str(tmp_path / "third"), "topic", "import"], input=damaged)
    assert result.exit_code == 1
    assert "line 2" in result.stderr


def test_memory_topics_cannot_be_read_from_another_process(basalt: Basalt, data: Path) -> None:
    with basaltmq.open(data) as db:
        db.topic("ram", engine="memory").append(b"x")
        assert "memory of the process" in basalt("topic", "read", "ram", code=1).stderr
        assert json.loads(basalt("topic", "list", "--json").output)[0]["records"] == 0


def test_null_values_are_read_and_appended_as_null(basalt: Basalt, data: Path) -> None:
    with basaltmq.open(data) as db:
        db.topic("a").append([Record(None, b"k", (("h", None),)), Record(b"", b"k")])
        db.topic("b")
    shown = basalt("topic", "read", "a").output
    assert [line["value"] for line in lines(shown)] == [None, ""]
    basalt("topic", "append", "b", stdin=shown)
    with basaltmq.open(data) as db:
        assert [(each.value, each.headers) for each in db.topic("b").read(0)] == [(None, (("h", None),)), (b"", ())]
    assert "needs value or value_base64" in basalt("topic", "append", "b", stdin='{"key": "k"}\n', code=1).stderr
    far = '{"value": "x", "timestamp_ms": 9223372036854775807}\n'
    assert "invalid_timestamp" in basalt("topic", "append", "b", stdin=far, code=1).stderr
