"""The command line against a real broker: effects, tables for people, and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pika
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from tests.interop.server import Broker

from basaltmq.broker.vhost_directory import NAME_FILE, VHostDirectories
from basaltmq.cli.main import main
from basaltmq.cli.topic import remote as server_topic
from basaltmq.errors import RemoteError
from basaltmq.http_client import path
from basaltmq.store.directory import encode_line

Run: TypeAlias = Callable[..., Result]


@pytest.fixture
def basalt(broker: Broker) -> Run:
    """Run a command against the broker; `code` is the exit code expected, `stdin` what it reads."""

    def run(*words: str, code: int = 0, stdin: str | bytes = "", **environment: str) -> Result:
        server = {"BASALT_SERVER": broker.url("admin"), **environment}
        result = CliRunner(env=server).invoke(main, list(words), input=stdin)
        assert result.exit_code == code, f"{words}: {result.output} {result.exception!r}"
        return result

    return run


@pytest.fixture
def connection(broker: Broker) -> Iterator[pika.BlockingConnection]:
    opened = pika.BlockingConnection(pika.URLParameters(broker.url()))
    yield opened
    if opened.is_open:
        opened.close()


def rows(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def test_messages_are_published_and_read_by_commands(basalt: Run) -> None:
    basalt("exchange", "declare", "news", "--type", "topic")
    basalt("queue", "create", "paper", "--arguments", '{"x-max-length": 10}')
    basalt("binding", "create", "news", "paper", "--key", "sport.#")
    listed = basalt("binding", "list").stdout
    assert "sport.#" in listed
    assert basalt("exchange", "publish", "news", "one", "--key", "sport.chess").stdout == "published and confirmed\n"
    basalt("exchange", "publish", "news", "--key", "sport.go", stdin="two")
    assert "no queue is bound" in basalt("exchange", "publish", "news", "x", "--key", "art", code=1).stderr
    peeked = basalt("queue", "peek", "paper").stdout
    assert "sport.chess" in peeked
    assert "one" in peeked
    assert json.loads(basalt("queue", "peek", "paper", "--json").stdout.splitlines()[1])["payload"] == "two"
    assert "x-max-length" in basalt("queue", "stats", "paper").stdout
    basalt("queue", "create", "archive")
    assert basalt("queue", "move", "paper", "archive", "--count", "1").stdout.startswith("1 message moved")
    listed = basalt("queue", "list").stdout
    assert listed.splitlines()[0].split()[:5] == ["queue", "type", "ready", "unacked", "bytes"]
    by_name = {each["name"]: each for each in rows(basalt("queue", "list", "--json"))}
    assert (by_name["paper"]["messages_ready"], by_name["archive"]["messages_ready"]) == (1, 1)
    assert "aborted" in basalt("queue", "purge", "paper", code=1, stdin="n\n").output.lower()
    basalt("queue", "purge", "paper", "--yes")
    basalt("binding", "delete", "news", "paper", "--key", "sport.#")
    assert "not bound" in basalt("binding", "delete", "news", "paper", "--key", "sport.#", code=1).stderr
    for queue in ("paper", "archive"):
        basalt("queue", "delete", queue, "--yes")
    basalt("exchange", "delete", "news")
    assert "news" not in basalt("exchange", "list").stdout


def test_users_are_created_log_in_and_are_deleted(basalt: Run) -> None:
    basalt("user", "create", "erin", "--tag", "management", stdin="first\n")
    basalt("permission", "set", "erin", "--configure", "^erin")
    assert "^erin" in basalt("permission", "list").stdout
    basalt("permission", "set", "erin", "--exchange", "amq.topic", "--write", "^erin[.]")
    assert "amq.topic" in basalt("permission", "list", "--topics").stdout
    mine = {"BASALT_USER": "erin", "BASALT_PASSWORD": "first"}
    basalt("queue", "create", "erins", **mine)
    assert "error [access_refused]" in basalt("queue", "create", "others", code=1, **mine).stderr
    basalt("user", "password", "erin", stdin="second\n")
    assert "error [authentication_failed]" in basalt("queue", "list", code=1, **mine).stderr
    basalt("user", "tags", "erin", "monitoring")
    assert "monitoring" in basalt("user", "list").stdout
    basalt("permission", "clear", "erin", "--topics")
    basalt("permission", "clear", "erin")
    basalt("user", "delete", "erin")
    assert "erin" not in basalt("user", "list").stdout
    assert "first line of stdin" in basalt("user", "create", "nobody", code=2).stderr


def test_a_failed_restart_reports_the_reason(basalt: Run, broker: Broker) -> None:
    basalt("vhost", "create", "mixed-up")
    name_file = VHostDirectories(broker.data_dir).path("mixed-up") / NAME_FILE
    before = name_file.read_bytes()
    name_file.write_bytes(encode_line({"name": "another"}))
    refused = basalt("vhost", "restart", "mixed-up", code=1)
    assert "is up" not in refused.output
    assert "error [vhost_down]: vhost 'mixed-up' is down" in refused.stderr
    assert "belongs to vhost 'another'" in refused.stderr
    with pytest.raises(RemoteError) as caught:
        broker.call("POST", path("vhosts", "mixed-up", "restart"))
    assert caught.value.status == 503
    name_file.write_bytes(before)
    assert basalt("vhost", "restart", "mixed-up").stdout == "vhost mixed-up is up\n"
    basalt("vhost", "delete", "mixed-up", "--yes")


def test_virtual_hosts_and_their_stores_are_managed(basalt: Run, tmp_path: Path) -> None:
    basalt("vhost", "create", "shop", "--description", "for tests")
    assert "for tests" in basalt("vhost", "list").stdout
    basalt("queue", "create", "q", "--vhost", "shop")
    assert "shop" in basalt("queue", "list", "--all").stdout
    assert basalt("vhost", "restart", "shop").stdout == "vhost shop is up\n"
    basalt("vhost", "store", "flush", "shop")
    assert "after" in basalt("vhost", "store", "compact", "shop", "--family", "queues").stdout
    assert "queues" in basalt("vhost", "store", "diagnostics", "shop").stdout
    basalt("vhost", "store", "set", "shop", "disable_auto_compactions=true")
    assert "is intact" in basalt("vhost", "store", "verify", "shop").stdout
    made = basalt("vhost", "store", "checkpoint", "shop", "nightly").stdout
    assert "is intact" in basalt("store", "verify", made.split()[-1]).stdout
    refused = basalt("vhost", "store", "checkpoint", "shop", str(tmp_path / "backup"), code=1).stderr
    assert "admin.backup_dir" in refused
    assert "error [unknown_family]" in basalt("vhost", "store", "flush", "shop", "--family", "x", code=1).stderr
    basalt("vhost", "delete", "shop", "--yes")
    assert "error [vhost_not_found]" in basalt("queue", "list", "--vhost", "shop", code=1).stderr


def test_policies_are_set_listed_and_deleted(basalt: Run) -> None:
    basalt("policy", "set", "short", "^tmp[.]", '{"message-ttl": 60000}', "--priority", "3", "--apply-to", "queues")
    assert '{"message-ttl":60000}' in basalt("policy", "list").stdout
    assert "JSON object" in basalt("policy", "set", "x", "x", "[1]", code=2).stderr
    basalt("policy", "delete", "short")
    assert "error [not_found]" in basalt("policy", "delete", "short", code=1).stderr


def test_connections_are_listed_and_closed(basalt: Run, connection: pika.BlockingConnection) -> None:
    channel = connection.channel()
    channel.queue_declare("watched")
    channel.basic_consume("watched", lambda *_: None, consumer_tag="watcher")
    [listed] = rows(basalt("connection", "list", "--json"))
    assert (listed["user"], listed["vhost"], listed["channels"]) == ("guest", "/", 1)
    assert "Pika" in basalt("connection", "list").stdout
    assert listed["name"] in basalt("connection", "channels").stdout
    assert "watcher" in basalt("connection", "consumers").stdout
    basalt("connection", "close", listed["name"], "--reason", "time to go")
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="time to go"):
        connection.process_data_events(20)
    assert "error [not_found]" in basalt("connection", "close", "nobody", code=1).stderr


def test_definitions_are_exported_and_imported(basalt: Run) -> None:
    basalt("queue", "create", "kept")
    exported = basalt("definitions", "export").stdout
    basalt("queue", "delete", "kept", "--yes")
    done = basalt("definitions", "import", stdin=exported)
    assert "queues" in done.stdout
    assert "kept" in basalt("queue", "list").stdout
    basalt("queue", "delete", "kept", "--yes")
    reported = basalt("definitions", "import", stdin='{"queues": [{"name": "x", "vhost": "no"}]}', code=2)
    assert "skipped: queue 'x'" in reported.stderr


def test_exported_definitions_are_readable_only_by_their_owner(basalt: Run, tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("")
    old.chmod(0o644)
    for file in (new, old):
        basalt("definitions", "export", str(file))
        assert file.stat().st_mode & 0o777 == 0o600
        assert "password_hash" in file.read_text()
    missing = str(tmp_path / "no" / "file.json")
    assert missing in basalt("definitions", "export", missing, code=1).stderr


def test_status_prints_one_page(basalt: Run, broker: Broker) -> None:
    said = basalt("status").stdout
    assert said.startswith("Basalt ")
    assert f"amqp {broker.port()}" in said
    assert rows(basalt("status", "--json"))[0]["overview"]["node"] in said


def test_an_unreachable_broker_is_a_one_line_error(basalt: Run) -> None:
    said = basalt("user", "list", code=1, BASALT_SERVER="http://127.0.0.1:1").stderr
    assert said.count("\n") == 1
    assert "error [unreachable]: no broker responds at http://127.0.0.1:1" in said
    assert "--server: 'ftp://x' is not the address" in basalt("user", "list", code=2, BASALT_SERVER="ftp://x").stderr


def test_the_same_commands_work_on_a_store_without_a_broker(tmp_path: Path) -> None:
    store = ["--data-dir", str(tmp_path / "store")]
    runner = CliRunner(env={"BASALT_SERVER": "http://127.0.0.1:1"})
    assert runner.invoke(main, [*store, "queue", "create", "embedded"]).exit_code == 0
    assert "embedded" in runner.invoke(main, [*store, "queue", "list"]).stdout
    asked = runner.invoke(main, [*store, "queue", "list", "--server", "http://127.0.0.1:1"])
    assert "no broker responds" in asked.stderr


def test_a_follower_of_a_broker_reports_records_deleted_by_retention(
    basalt: Run, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    basalt("topic", "create", "fast")
    basalt("topic", "append", "fast", "--raw", stdin="first")
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        if not waits:
            basalt("topic", "append", "fast", "--raw", stdin="0\n1\n2\n3\n4")
            admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{broker.port('kafka')}"})
            (trimmed,) = admin.delete_records([TopicPartition("fast", 0, 4)]).values()
            assert trimmed.result(60).low_watermark == 4
        waits.append(seconds)
        assert len(waits) < 20

    monkeypatch.setattr(server_topic, "time", SimpleNamespace(sleep=sleep))
    result = basalt("topic", "read", "fast", "--follow", "--raw", "--limit", "3")
    assert result.stdout == "first\n3\n4\n"
    assert "offsets 1 to 3 of partition 0 were deleted by retention" in result.stderr


LINES = b'{"value":"a","key":"k","headers":{"h":"1"}}\n{"value_base64":"/w==","key":"k","tags":["t"]}\n'


@pytest.mark.spec("B3")
def test_topics_of_a_broker_are_written_read_and_managed(basalt: Run) -> None:
    basalt("topic", "create", "clicks", "--partitions", "3", "--retention-ms", "86400000")
    assert "exists with other settings" in basalt("topic", "create", "clicks", "--partitions", "4", code=1).stderr
    assert "2 records appended" in basalt("topic", "append", "clicks", stdin=LINES).stderr
    assert "1 records appended" in basalt("topic", "append", "clicks", "--raw", "--partition", "1", stdin="x").stderr
    assert (
        "no partition 9" in basalt("topic", "append", "clicks", "--raw", "--partition", "9", stdin="x", code=1).stderr
    )
    assert "line 1" in basalt("topic", "append", "clicks", stdin="{", code=1).stderr

    read = [json.loads(line) for line in basalt("topic", "read", "clicks", "--key", "k").stdout.splitlines()]
    assert [(each.get("value"), each.get("value_base64"), each["offset"]) for each in read] == [
        ("a", None, 0),
        (None, "/w==", 1),
    ]
    assert (read[0]["headers"], read[1]["tags"]) == ({"h": "1"}, ["t"])
    assert basalt("topic", "read", "clicks", "--raw", "--tag", "t").stdout_bytes == b"\xff\n"
    assert basalt("topic", "read", "clicks", "--partition", "1", "--from", "latest").stdout == ""
    assert len(basalt("topic", "read", "clicks", "--limit", "2").stdout.splitlines()) == 2
    assert len(basalt("topic", "read", "clicks", "--since-ms", "0").stdout.splitlines()) == 3
    assert "not 7" in basalt("topic", "read", "clicks", "--partition", "7", code=2).stderr

    listed = next(each for each in rows(basalt("topic", "list", "--json")) if each["topic"] == "clicks")
    assert (listed["records"], listed["partitions"], listed["engine"]) == (3, 3, "segment")
    described = basalt("topic", "describe", "clicks").stdout
    assert "retention_ms: 86400000" in described

    moved = rows(basalt("topic", "groups", "billing", "--reset", "latest", "--topic", "clicks", "--json"))
    assert sorted(each["offset"] for each in moved) == [0, 1, 2]
    assert "billing" in basalt("topic", "groups").stdout
    assert {each["lag"] for each in rows(basalt("topic", "groups", "billing", "--json"))} == {0}
    assert "--reset requires GROUP" in basalt("topic", "groups", "billing", "--reset", "latest", code=2).stderr

    assert "topic migrate does not support --server" in basalt("topic", "migrate", "clicks", "memory", code=2).stderr
    basalt("topic", "delete", "clicks", "--yes")
    assert "there is no topic" in basalt("topic", "read", "clicks", code=1).stderr


def test_records_of_the_maximum_size_round_trip(basalt: Run) -> None:
    basalt("topic", "create", "large")
    large = [b"x" * (15 << 20), *[b"y" * 3_000] * 1_000]
    assert "1,001 records" in basalt("topic", "append", "large", "--raw", stdin=b"\n".join(large)).stderr
    assert basalt("topic", "read", "large", "--raw").stdout_bytes == b"".join(each + b"\n" for each in large)
    basalt("topic", "delete", "large", "--yes")


def test_each_topic_operation_requires_its_permission(basalt: Run) -> None:
    basalt("user", "create", "mia", "--tag", "management", stdin="secret\nsecret\n")
    basalt("permission", "set", "mia", "--configure", "^$", "--write", "^in$", "--read", "^out$")
    basalt("topic", "create", "in")
    basalt("topic", "create", "out")
    mia = {"BASALT_USER": "mia", "BASALT_PASSWORD": "secret"}
    basalt("topic", "append", "in", "--raw", stdin="x", **mia)
    basalt("topic", "read", "out", **mia)
    for words in (
        ("topic", "append", "out", "--raw"),
        ("topic", "read", "in"),
        ("topic", "delete", "out", "--yes"),
        ("topic", "create", "more"),
        ("topic", "groups", "g", "--reset", "latest", "--topic", "out"),
    ):
        assert "error [access_refused]" in basalt(*words, code=1, stdin="x", **mia).stderr, words
    assert [each["topic"] for each in rows(basalt("topic", "list", "--json", **mia))] == ["out"]


def test_deleting_a_stream_queue_deletes_its_topic(basalt: Run) -> None:
    basalt("queue", "create", "both", "--arguments", '{"x-queue-type": "stream"}')
    basalt("topic", "append", "both", "--raw", stdin="x")
    assert "is an AMQP stream queue" in basalt("topic", "delete", "both", "--yes", code=1).stderr
    basalt("queue", "delete", "both", "--yes")


def test_commands_read_but_do_not_write_the_directory_of_a_running_broker(broker: Broker, basalt: Run) -> None:
    basalt("topic", "create", "seen")
    basalt("queue", "create", "seen-too")
    place = ("--data-dir", str(broker.data_dir))
    assert "seen" in CliRunner().invoke(main, ["topic", "list", *place]).stdout
    assert "seen-too" in CliRunner().invoke(main, [*place, "queue", "list", "--vhost=/"]).stdout
    wrong = CliRunner().invoke(main, ["topic", "list", *place, "--vhost", "nope"])
    assert (wrong.exit_code, "no vhost 'nope'" in wrong.stderr) == (1, True)
    locked = CliRunner().invoke(main, ["topic", "create", "x", *place])
    assert (locked.exit_code, "this is a broker's directory: use --server" in locked.stderr) == (1, True)


def test_a_too_large_request_gets_its_status_although_the_body_is_not_read(broker: Broker) -> None:
    with pytest.raises(RemoteError, match="the body exceeds") as caught:
        broker.call("PUT", path("queues", "/", "large"), {"arguments": {"x": "y" * (64 << 20)}})
    assert caught.value.status == 413
