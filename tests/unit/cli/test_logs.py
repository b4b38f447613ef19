"""The log: one line per record whatever the names of clients are, no wait for a reader, and lost lines are counted."""

from __future__ import annotations

import io
import json
import logging
import threading

import pytest

from basaltmq.cli.server import logs as module
from basaltmq.cli.server.logs import Logs


def logged(form: str, environment: dict[str, str] | None = None) -> str:
    stream = io.StringIO()
    logger = logging.Logger("basaltmq.test")
    logs = Logs("info", form, stream=stream, environment=environment or {}, root=logger)
    logger.debug("not shown")
    logger.warning("vhost %s failed", "a\nERROR \x1b[31mfake", extra={"vhost": "a\nb", "restarts": 2})
    logs.close()
    return stream.getvalue()


def test_line_breaks_in_names_are_escaped() -> None:
    said = logged("text")
    assert said.count("\n") == 1
    assert "\x1b" not in said
    assert r"WARNING test: vhost a\nERROR \x1b[31mfake failed vhost=a\nb restarts=2" in said


def test_json_lines_carry_the_fields() -> None:
    line = json.loads(logged("json"))
    assert line["level"] == "warning"
    assert line["message"] == "vhost a\nERROR \x1b[31mfake failed"
    assert (line["vhost"], line["restarts"]) == ("a\nb", 2)
    assert line["time"].endswith("Z")


def test_journald_gets_priorities_and_no_timestamps() -> None:
    assert logged("text", {"JOURNAL_STREAM": "8:1"}).startswith("<4>test: vhost")


@pytest.mark.promise("P8")
def test_a_blocked_log_reader_loses_lines_without_delaying_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINES_WAITING_MAX", 3)
    go, entered = threading.Event(), threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            entered.set()
            assert go.wait(30)
            return super().write(text)

    stream = Stuck()
    logger = logging.Logger("basaltmq.test")
    logs = Logs("info", "text", stream=stream, environment={}, root=logger)
    logger.info("first")
    assert entered.wait(30)
    for number in range(10):
        logger.info("line %d", number)
    go.set()
    logs.close()
    said = stream.getvalue()
    assert "first" in said
    assert "line 2" in said
    assert "line 3" not in said
    assert "7 log lines dropped" in said


def test_the_log_level_can_change_at_runtime() -> None:
    stream = io.StringIO()
    logger = logging.getLogger("basaltmq.test_level")
    logs = Logs("error", "text", stream=stream, environment={}, root=logger)
    logger.info("one")
    logs.change("info", "json")
    logger.info("two")
    logs.close()
    assert json.loads(stream.getvalue())["message"] == "two"
