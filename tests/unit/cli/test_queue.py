"""`basalt queue`: queues from the command line, also next to a running process where that is supported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from click.testing import CliRunner, Result

import basaltmq
from basaltmq.cli.main import main
from basaltmq.cli.queue.message_lines import PREVIEW_CHARS, preview
from basaltmq.queues.transactions.xid import Xid

Run: TypeAlias = Callable[..., Result]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def run(data: Path) -> Run:
    """Run `basalt queue ...` on the store of the test; `code` is the exit code expected, `stdin` what it reads."""

    def invoke(*words: str, code: int = 0, stdin: str | bytes = "") -> Result:
        result = CliRunner().invoke(main, ["--data-dir", str(data), "queue", *words], input=stdin)
        assert result.exit_code == code, f"{words}: {result.output} {result.exception!r}"
        return result

    return invoke


def lines(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def fill(run: Run, *words: str, name: str = "jobs") -> None:
    run("create", name)
    run("enqueue", name, "--raw", stdin="".join(f"{word}\n" for word in words))


def test_a_queue_is_created_filled_peeked_leased_and_acknowledged(run: Run) -> None:
    assert "basalt queue enqueue jobs" in run("create", "jobs").stdout
    given = [{"payload": "one", "headers": {"a": "b"}}, {"payload_base64": "/w=="}, {"payload": ""}]
    entered = run("enqueue", "jobs", stdin="\n".join(map(json.dumps, given)) + "\n\n")
    assert entered.stdout == "3 messages enqueued in jobs\n"
    seen = lines(run("peek", "jobs", "--json"))
    assert [line.get("payload", line.get("payload_base64")) for line in seen] == ["one", "/w==", ""]
    assert seen[0]["headers"] == {"a": "b"}
    leased = lines(run("lease", "jobs", "--count", "2", "--json"))
    assert [line["id"] for line in leased] == [line["id"] for line in seen[:2]]
    token = str(leased[0]["token"])
    assert run("ack", "jobs", token, leased[1]["id"]).stdout == "1 message of queue jobs acked\n"
    assert run("ack", "jobs", token).stdout == "1 message of queue jobs acked\n"
    assert "error [stale_lease]" in run("ack", "jobs", token, code=1).stderr
    assert lines(run("lease", "jobs", "--json", "--ack"))[0]["payload"] == ""
    assert run("lease", "jobs").stdout == "no ready messages in queue jobs\n"
    (row,) = json.loads(run("list", "--json").stdout)
    assert (row["ready"], row["leased"], row["enqueued"], row["acked"]) == (0, 0, 3, 3)


def test_enqueue_accepts_the_output_of_peek(run: Run) -> None:
    run("create", "a", "--priorities-max", "5")
    run("create", "b", "--priorities-max", "5")
    given = {"payload": "x\u0000y", "headers": {"h": "v"}, "fairness_key": "k", "weight": 2, "priority": 3}
    run("enqueue", "a", stdin=json.dumps({**given, "throttle_keys": ["t"], "ttl_ms": 600_000}))
    printed = run("peek", "a", "--json").stdout
    run("enqueue", "b", stdin=printed)
    (copied,) = lines(run("peek", "b", "--json"))
    assert {name: copied[name] for name in given} == given
    assert copied["throttle_keys"] == ["t"]


def test_tables_are_aligned(run: Run) -> None:
    fill(run, "one", "two \x1b[2J", name="jobs")
    run("create", "z", "--dead-letter-queue", "jobs")
    listed = run("list").stdout.splitlines()
    assert listed[0].split() == [
        *("queue", "ready", "leased", "delayed", "bytes", "enqueued", "acked", "failed", "quarantined"),
        "dead_letter_queue",
    ]
    assert listed[2].split() == ["jobs", "2", "0", "0", "11", "2", "0", "0", "0", "-"]
    peeked = run("peek", "jobs").stdout
    assert "\x1b" not in peeked
    assert "two \\x1b[2J" in peeked
    assert "acknowledge with: basalt queue ack jobs" in run("lease", "jobs").stdout
    shown = run("stats", "jobs").stdout
    assert "visibility_timeout_ms: 30000" in shown
    assert "ready" in shown
    (entry,) = json.loads(run("stats", "z", "--json").stdout)
    assert entry["settings"]["dead_letter_queue"] == "jobs"
    assert entry["counts"]["ready"] == 0


def test_list_pages_continue_after_a_name(run: Run) -> None:
    for name in ("c", "a", "b"):
        run("create", name)
    assert [row["queue"] for row in json.loads(run("list", "--json", "--limit", "2").stdout)] == ["a", "b"]
    assert [row["queue"] for row in json.loads(run("list", "--json", "--after", "b").stdout)] == ["c"]


def test_reading_works_and_writing_is_refused_while_another_process_has_the_store_open(run: Run, data: Path) -> None:
    with basaltmq.open(data) as db:
        queue = db.queue("jobs")
        queue.enqueue([b"one", b"x" * 100_000])
        queue.lease()
        (row,) = json.loads(run("list", "--json").stdout)
        assert (row["ready"], row["leased"]) == (1, 1)
        assert lines(run("peek", "jobs", "--json"))[0]["payload"] == "x" * 100_000
        assert json.loads(run("stats", "jobs", "--json").stdout)[0]["counts"]["enqueued"] == 2
        assert "error [store_locked]" in run("lease", "jobs", code=1).stderr
        assert queue.stats()["leased"] == 1


@pytest.mark.spec("C8")
def test_a_lease_is_nacked_or_released_by_its_token(run: Run) -> None:
    fill(run, "x")
    (first,) = lines(run("lease", "jobs", "--json"))
    run("release", "jobs", str(first["token"]))
    (second,) = lines(run("lease", "jobs", "--json"))
    assert second["attempts"] == 0
    run("nack", "jobs", str(second["token"]), "--error", "it broke")
    (third,) = lines(run("lease", "jobs", "--json"))
    assert third["attempts"] == 1
    assert third["headers"]["x-last-error"] == "it broke"
    run("nack", "jobs", str(third["token"]), "--delay-ms", "3600000")
    assert json.loads(run("list", "--json").stdout)[0]["delayed"] == 1


@pytest.mark.spec("C9")
def test_redrive_selects_dead_letters_by_header_and_count(run: Run) -> None:
    run("create", "jobs", "--dead-letter-queue", "dead")
    given = [{"payload": str(number), "headers": {"kind": "odd" if number % 2 else "even"}} for number in range(4)]
    run("enqueue", "jobs", stdin="\n".join(map(json.dumps, given)))
    leased = lines(run("lease", "jobs", "--count", "4", "--json"))
    run("nack", "jobs", str(leased[0]["token"]), "--reject")
    assert run("redrive", "dead", "--header", "kind=odd").stdout == "2 messages redriven from dead; 2 left\n"
    assert [line["payload"] for line in lines(run("peek", "jobs", "--json"))] == ["1", "3"]
    assert run("redrive", "dead", "--count", "1").stdout == "1 message redriven from dead; 1 left\n"
    assert "NAME=VALUE" in run("redrive", "dead", "--header", "kind", code=2).stderr
    assert "error [queue_not_found]" in run("redrive", "dead", "--to", "nowhere", code=1).stderr


def test_purge_and_delete_ask_for_confirmation(run: Run) -> None:
    fill(run, "one", "two")
    run("purge", "jobs", code=1, stdin="n\n")
    assert json.loads(run("list", "--json").stdout)[0]["ready"] == 2
    assert "2 messages of queue jobs deleted" in run("purge", "jobs", stdin="y\n").stdout
    run("delete", "jobs", code=1, stdin="n\n")
    assert run("delete", "jobs", "--yes").stdout == "queue jobs deleted\n"
    assert run("list").stdout == "no queues; create one with: basalt queue create NAME\n"
    assert "error [queue_not_found]" in run("purge", "jobs", "--yes", code=1).stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"plain", "line 2: JSON is malformed"),
        (b'{"value": "x"}', "line 2: Object contains unknown field `value`"),
        (b'{"payload": 5}', "line 2: Expected `str | null`"),
        (b'{"headers": {}}', "line 2: set exactly one of payload and payload_base64"),
        (b'{"payload": "x", "payload_base64": "eA=="}', "line 2: set exactly one of"),
        (b'{"payload_base64": "?"}', "line 2: payload_base64:"),
        (b'{"payload": "\xff"}', "line 2:"),
        (b'{"payload": "x", "priority": 300}', "priority of a message must be 0 to 255"),
    ],
)
def test_an_invalid_message_line_is_named_and_its_batch_is_not_enqueued(run: Run, line: bytes, said: str) -> None:
    run("create", "jobs")
    refused = run("enqueue", "jobs", code=1, stdin=b'{"payload": "good"}\n' + line + b"\n")
    assert said in refused.stderr
    assert "0 messages enqueued before this" in refused.stderr
    assert json.loads(run("list", "--json").stdout)[0]["ready"] == 0


def test_options_of_enqueue_are_defaults_of_the_messages(run: Run) -> None:
    run("create", "jobs")
    own = json.dumps({"payload": "own", "fairness_key": "mine"})
    run("enqueue", "jobs", "--fairness-key", "theirs", "--ttl-ms", "600000", stdin=own + '\n{"payload": "other"}\n')
    found = {line["payload"]: line for line in lines(run("peek", "jobs", "--json"))}
    assert found["own"]["fairness_key"] == "mine"
    assert found["other"]["fairness_key"] == "theirs"
    assert "expires_ms" in found["own"]
    run("enqueue", "jobs", "--raw", "--delay-ms", "3600000", stdin=b"\xff\n\n")
    (row,) = json.loads(run("list", "--json").stdout)
    assert (row["ready"], row["delayed"]) == (2, 2)


def test_more_lines_than_a_batch_are_all_enqueued(run: Run) -> None:
    run("create", "jobs", "--durability", "written")
    assert "2,500 messages" in run("enqueue", "jobs", "--raw", stdin="x\n" * 2_500).stdout
    assert json.loads(run("list", "--json").stdout)[0]["ready"] == 2_500


def test_usage_errors_are_one_line(run: Run, tmp_path: Path) -> None:
    assert "error [store_not_found]" in run("list", code=1).stderr
    run("create", "jobs")
    assert "error [queue_already_exists]" in run("create", "jobs", code=1).stderr
    assert "error [invalid_config]" in run("create", "x", "--attempts-max", "-1", code=1).stderr
    assert "error [queue_not_found]" in run("peek", "nowhere", code=1).stderr
    assert "error [queue_not_found]" in run("enqueue", "nowhere", code=1, stdin="{}").stderr
    run("lease", "jobs", "--count", "0", code=2)
    run("ack", "jobs", "token", code=2)
    run("ack", "jobs", "1", "no-id", code=2)
    script = tmp_path / "broken.lua"
    script.write_text("function on_enqueue(")
    assert "error [script_error]" in run("create", "s", "--on-enqueue", str(script), code=1).stderr


def test_a_preview_is_one_short_line() -> None:
    assert preview(b"a\nb\x00\xff") == "a\\nb\\x00\\xff"
    assert preview("ä€".encode()) == "ä€"
    assert len(preview(b"x" * 1_000)) == PREVIEW_CHARS
    assert preview("€".encode() * 1_000) == "€" * (PREVIEW_CHARS - 1) + "…"


@pytest.mark.spec("A6")
def test_in_doubt_branches_are_listed_and_resolved_by_commands(run: Run, data: Path) -> None:
    fill(run, "one", "two")
    assert "no prepared branches" in run("transactions").stdout
    x, y = Xid(1, b"global", b"a"), Xid(1, b"global", b"b")
    with basaltmq.open(data) as db:
        for xid in (x, y):
            with db.xa.begin(xid) as session:
                session.dequeue("jobs")
                session.enqueue("jobs", b"more")
            db.xa.prepare(xid)
        (first, second) = json.loads(run("transactions", "--json").stdout)
    assert (first["xid"], first["held"], first["to_enqueue"], first["queues"]) == (str(x), 1, 1, ["jobs"])
    assert second["state"] == "prepared"
    assert str(y) in run("transactions").stdout
    assert "[queue_held]" in run("delete", "jobs", "--yes", code=1).stderr
    run("commit", str(x), stdin="n\n", code=1)
    assert "committed" in run("commit", str(x), "--yes").stdout
    assert "rolled back" in run("rollback", str(y), stdin="y\n").stdout
    assert [line["payload"] for line in lines(run("peek", "jobs", "--json"))] == ["two", "more"]
    assert "[xa_heuristic_commit]" in run("rollback", str(x), "--yes", code=1).stderr
    assert "committed by an operator" in run("transactions").stdout
    run("forget", str(x), "--yes")
    run("forget", str(y), "--yes")
    assert "no prepared branches" in run("transactions").stdout
    assert "format:global:branch" in run("forget", "nonsense", "--yes", code=1).stderr
