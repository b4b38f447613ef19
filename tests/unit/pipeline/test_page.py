"""Report pages are well formed and escape client names."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from basaltmq.pipeline.audit.audit import Audited, Bucket, PartitionAudit
from basaltmq.pipeline.dlq import Cause, DeadHour, DeadKey, DeadQueue, DlqReport
from basaltmq.pipeline.findings import Finding, Severity
from basaltmq.pipeline.lag import GroupLag, Lag, QueueBacklog
from basaltmq.pipeline.latency import Latencies, Minute, QueueLatency, Times
from basaltmq.pipeline.profile import (
    FieldProfile,
    HourCount,
    KeyCount,
    Profile,
    SizeBucket,
    Sizes,
    TopicProfile,
)
from basaltmq.pipeline.reports.figures import number
from basaltmq.pipeline.reports.pages import audit_page, dlq_page, lag_page, latency_page, profile_page
from basaltmq.pipeline.reports.plots import bars, horizontal_bars, scale

pytestmark = pytest.mark.spec("F2")

H = "<script>alert('x')</script>&\""
HOUR = "2026-11-01 00:00"
TIMES = Times(1.5, None, 3e6)
SIZES = Sizes(1, 2.5, 3, 4, 5, 6, 7000)

PAGES = {
    "audit": audit_page(
        Audited(
            H,
            H,
            [Finding(Severity.LOSS, H, H, H)],
            [PartitionAudit(H, 0, 0, 9, 1234, 1234, None)],
            [Bucket(H, HOUR, 5, 4)],
            1.0,
        )
    ),
    "latency": latency_page(
        Latencies(
            [QueueLatency(H, None, 1234, 1, 0, 0, 0, 0, TIMES, TIMES, TIMES)],
            [QueueLatency(H, H, 1, 1, 0, 0, 0, 0, TIMES, TIMES, TIMES)],
            [Minute(H, HOUR, 1, 1, 0)],
            {H: 1.5},
        )
    ),
    "lag": lag_page(Lag([GroupLag(H, H, 0, 5, 10, 1234)], [QueueBacklog(H, 50, 1 << 30, 7)])),
    "dlq": dlq_page(
        DlqReport(
            [DeadQueue(H, 1234, 100, H, H, 1, 2)],
            [Cause(H, H, H, H, 3, 9, H, H)],
            [DeadHour(H, HOUR, H, 3)],
            [DeadKey(H, H, 4)],
            2.5,
        )
    ),
    "profile": profile_page(
        Profile(
            [TopicProfile(H, 1234, 2, H, H, 1, 2, 3, SIZES, SIZES, 10, 9, 0.9, H)],
            [FieldProfile(H, H, H, 9, 0.1, 5, H, H)],
            [KeyCount(H, H, 5)],
            [SizeBucket(H, 2048, 7)],
            [HourCount(H, HOUR, 1000)],
            [H],
            3.0,
        )
    ),
}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_well_formed_and_escaped(name: str) -> None:
    made = PAGES[name]
    assert "<script" not in made
    assert "1,234" in made
    assert "http" not in made, "a page loads no external resource"
    root = ElementTree.fromstring(re.sub(r"<!doctype html>|<meta [^>]*>", "", made))  # noqa: S314 made here
    text = "".join(root.itertext())
    assert H in text
    assert "&lt;" not in text, "escaped twice"
    assert list(root.iter("rect"))


def test_pages_without_data_say_so() -> None:
    assert "No inconsistency found." in audit_page(Audited("/d", None, [], [], [], 0.1))
    assert "no events" in latency_page(Latencies([], [], [], {}))
    assert "no queues" in lag_page(Lag([], []))
    assert "No dead letters." in dlq_page(DlqReport([], [], [], [], 0.0))
    assert "no records" in profile_page(Profile([], [], [], [], [], [], 0.0))


def test_backlog_shows_ready_and_delayed_messages() -> None:
    """The count of messages does not include delayed ones."""
    assert "ready or leased 50 messages" in PAGES["lag"]
    assert "delayed 7 messages" in PAGES["lag"]


def test_no_plot_without_data() -> None:
    assert bars("x", [], {}, "records") is None
    assert horizontal_bars("x", [], {}, "records") is None
    plot = bars("x", ["a"], {"only": [0.0]}, "records")
    assert plot is not None
    assert not plot.bars


@pytest.mark.parametrize(
    ("largest", "top", "step"),
    [(0, 1, 1), (1, 1, 0.25), (7, 8, 2), (100, 100, 25), (101, 150, 50), (0.3, 0.3, 0.1), (4e9, 4e9, 1e9)],
)
def test_axis_has_round_numbers(largest: float, top: float, step: float) -> None:
    assert scale(largest) == pytest.approx((top, step))


def test_plot_of_many_bars_sums_neighbours() -> None:
    plot = bars("x", [str(i) for i in range(5000)], {"n": [1.0] * 5000}, "records")
    assert plot is not None
    assert len(plot.bars) == 5000 // 13 + 1
    assert plot.bars[0].tooltip == "0: n 13 records"


@pytest.mark.parametrize(
    ("value", "text"), [(7, "7"), (12345, "12,345"), (1.25, "1.25"), (3_400_000, "3.4 M"), (99.95, "100.0")]
)
def test_numbers_are_formatted_briefly(value: float, text: str) -> None:
    assert number(value) == text
