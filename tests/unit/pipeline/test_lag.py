"""Lag and rates of groups and queues, while another process has the store open."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import basaltmq
from basaltmq.cli.main import main
from basaltmq.errors import GroupNotFoundError
from basaltmq.pipeline.lag import lag

pytestmark = pytest.mark.spec("F2")


def test_backlog_and_rates_are_reported_while_a_writer_runs(tmp_path: Path) -> None:
    with basaltmq.open(tmp_path) as db:
        orders = db.topic("orders")
        orders.append([b"x"] * 100)
        jobs = db.queue("jobs")
        jobs.enqueue([b"%d" % i for i in range(10)])
        group = db.streams.topics.get("orders").id

        def meanwhile(_: float) -> None:
            db.streams.offsets.commit("readers", {(group, 0): 60})
            jobs.ack(jobs.lease(4))

        db.streams.offsets.commit("readers", {(group, 0): 20})
        found = lag(str(tmp_path), pace_s=2.0, sleep=meanwhile)
        (readers,) = found.groups
        assert (readers.lag, readers.read_per_s, readers.drains_in_s) == (40, 20.0, 2.0)
        (queue,) = found.queues
        assert (queue.messages, queue.acked_per_s, queue.drains_in_s) == (6, 2.0, 3.0)
        still = lag(str(tmp_path), groups=["readers"], pace_s=1.0, sleep=lambda _: None)
        assert (still.groups[0].read_per_s, still.groups[0].drains_in_s) == (0.0, None)
        reported = CliRunner().invoke(main, ["--data-dir", str(tmp_path), "pipeline", "lag"])
        assert reported.exit_code == 0, reported.output
        assert "readers" in reported.stdout
        assert "jobs" in reported.stdout
        with pytest.raises(GroupNotFoundError):
            lag(str(tmp_path), groups=["nobody"])
        wrong = CliRunner().invoke(main, ["--data-dir", str(tmp_path / "none"), "pipeline", "lag"])
        assert wrong.exit_code == 1
        assert wrong.stderr.count("\n") == 1
        assert "there is no store at" in wrong.stderr
