"""Pages are whole, hold what they are given, and nothing that is given becomes markup."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from basaltmq.pipeline.page import bars, code, heading, lying_bars, number, page, scale, table, tiles, verdict

pytestmark = pytest.mark.spec("F2")

HOSTILE = "<script>alert('x')</script>&\""


def test_a_page_is_well_formed_and_escapes_everything() -> None:
    made = page(
        HOSTILE,
        [
            heading(HOSTILE),
            table([{HOSTILE: HOSTILE, "severity": HOSTILE, "n": 1234}, {HOSTILE: None, "severity": "x", "n": 1.5}]),
            bars(HOSTILE, [HOSTILE] * 30, {HOSTILE: [float(i) for i in range(30)], "zero": [0.0] * 30}, HOSTILE),
            lying_bars(HOSTILE, [HOSTILE, "b"], {HOSTILE: [1.0, 2.0]}, HOSTILE),
            tiles([(HOSTILE, HOSTILE), ("n", 7)]),
            verdict(HOSTILE, HOSTILE),
            code(HOSTILE),
        ],
    )
    assert "<script" not in made
    assert "1,234" in made
    body = made.removeprefix("<!doctype html>\n")
    body = re.sub(r"<meta [^>]*>", "", body)
    root = ElementTree.fromstring(body)  # noqa: S314 made here
    # A bar for each figure that is not 0, and two for the legend.
    assert len(list(root.iter("rect"))) == 29 + 2 + 2
    assert "http" not in made
    assert HOSTILE in "".join(root.itertext())


def test_nothing_to_plot_is_no_plot() -> None:
    assert bars("x", [], {}) == ""
    assert "none" in table([], "none")
    assert lying_bars("x", [], {}) == ""
    assert "rect" not in bars("x", ["a"], {"only": [0.0]})


@pytest.mark.parametrize(
    ("largest", "top", "step"),
    [(0, 1, 1), (1, 1, 0.25), (7, 8, 2), (100, 100, 25), (101, 150, 50), (0.3, 0.3, 0.1), (4e9, 4e9, 1e9)],
)
def test_an_axis_has_round_numbers(largest: float, top: float, step: float) -> None:
    assert scale(largest) == pytest.approx((top, step))


def test_a_plot_of_many_bars_sums_neighbours_up() -> None:
    made = bars("x", [str(i) for i in range(5000)], {"n": [1.0] * 5000})
    assert made.count("<rect") == 5000 // 13 + 1
    assert "0: n 13" in made


@pytest.mark.parametrize(
    ("value", "text"), [(7, "7"), (12345, "12,345"), (1.25, "1.25"), (3_400_000, "3.4 M"), (99.95, "100.0")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
