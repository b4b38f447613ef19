"""The parts of the comparison that need no peer: processes, commands, figures and the chart."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench.side_by_side.chart import chart
from bench.side_by_side.comparison import quartiles, rows
from bench.side_by_side.flood import Flood, flood_of
from bench.side_by_side.loads import FAN_OUT, PUB, QUEUE, SUB, Command, Task, at_once, go_command, rate_of
from bench.side_by_side.process import Side, free_port, running

LISTEN = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(60)"
SIDE = Side("Peer", 1, 1, 0.0)


def test_a_process_runs_as_long_as_it_is_used(tmp_path: Path) -> None:
    port = free_port()
    with running("Peer", [sys.executable, "-c", LISTEN, str(port)], tmp_path, port) as side:
        assert side.address == f"127.0.0.1:{port}"
        os.kill(side.pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(side.pid, 0)


def test_a_process_that_ends_shows_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such setting')"]
    with (
        pytest.raises(TimeoutError, match=r"(?s)ended with code 1.*no such setting"),
        running("Peer", command, tmp_path, free_port()),
    ):
        pass


def reporting(rates: dict[str, float]) -> Command:
    """A load that only reports."""

    def command(side: Side, role: str, task: Task, at: int) -> list[str]:
        return [sys.executable, "-c", f"print('{role} 1 1.0 {rates[role] + at:.0f}')"]

    return command


@pytest.mark.parametrize(("publisher", "consumer", "rate"), [(100, 30, 30), (20, 30, 20)])
def test_the_slower_side_is_the_rate(publisher: float, consumer: float, rate: float) -> None:
    command = reporting({PUB: publisher, SUB: consumer})
    assert at_once(command, SIDE, Task(QUEUE, "q", 1, 8, 1)) == rate
    assert at_once(command, SIDE, Task(FAN_OUT, "q", 1, 8, 1, consumers=3)) == 3 * rate


@pytest.mark.parametrize("failing", [PUB, SUB])
def test_a_failed_load_is_an_error(failing: str) -> None:
    def command(side: Side, role: str, task: Task, at: int) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit(3)" if role == failing else "print('pub 1 1 5')"]

    with pytest.raises(RuntimeError, match="ended with code 3"):
        at_once(command, SIDE, Task(QUEUE, "q", 1, 8, 1))


def test_consumers_of_a_fan_out_have_groups_of_their_own() -> None:
    command = go_command(Path("load"), "nats")
    task = Task(FAN_OUT, "t", 5, 8, 2, consumers=2)
    kinds = [command(SIDE, *each)[4] for each in ((PUB, task, 0), (SUB, task, 0), (SUB, task, 1))]
    assert kinds == ["stream", "group:g0", "group:g1"]


@pytest.mark.parametrize("reported", ["sub 5 0.1 50 p50 0.1 p99 0.2 ms\n", '{"rate": 50.0}\n'])
def test_rates_are_read_from_either_format(reported: str) -> None:
    assert rate_of(reported) == 50


def test_averages_of_perf_test() -> None:
    printed = (
        "id: t, time 1 s, sent: 9 msg/s\nid: t, sending rate avg: 815 msg/s\nid: t, receiving rate avg: 110 msg/s\n"
    )
    assert flood_of(printed) == Flood(815, 110)
    with pytest.raises(RuntimeError, match="connection refused"):
        flood_of("connection refused")


def test_a_ratio_is_the_median_of_those_within_turns() -> None:
    seen = {"job": {"Basalt": [10.0, 20.0, 60.0, 40.0, 50.0], "Peer": [5.0, 20.0, 10.0, 10.0, 50.0]}}
    made = {each.name: each.value for each in rows(seen)}
    assert made["job: Basalt / Peer"] == 2.0
    assert made["job, Basalt (0.0 to 0.1 k)"] == 40.0
    assert quartiles(seen["job"]["Basalt"]) == (20.0, 40.0, 50.0)


def test_the_chart_draws_a_bar_per_broker_and_names_the_machine() -> None:
    figures = {"a < b": {"Basalt": [100.0] * 5, "Peer": [50.0] * 5}, "c": {"Basalt": [1.0] * 5}}
    drawn = ElementTree.fromstring(chart(figures, "2026-01-02, 2 cores"))  # noqa: S314  (made by ourselves)
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "c", "Basalt", "Peer", "100", "50", "2026-01-02, 2 cores"} <= set(texts)
    first, second = [float(each.get("width", 0)) for each in drawn.iter("{http://www.w3.org/2000/svg}rect")][1:3]
    assert first == 2 * second
