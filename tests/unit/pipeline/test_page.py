"""Pages are whole, hold what they are given, and nothing that is given becomes markup."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from basaltmq.pipeline.page import bars, heading, page, table

pytestmark = pytest.mark.spec("F2")

HOSTILE = "<script>alert('x')</script>&\""


def test_a_page_is_well_formed_and_escapes_everything() -> None:
    made = page(
        HOSTILE,
        [
            heading(HOSTILE),
            table([{HOSTILE: HOSTILE, "severity": HOSTILE, "n": 1234}, {HOSTILE: None, "severity": "x", "n": 1.5}]),
            bars(HOSTILE, [HOSTILE] * 30, {HOSTILE: [float(i) for i in range(30)], "zero": [0.0] * 30}),
        ],
    )
    assert "<script" not in made
    assert "1,234" in made
    body = made.removeprefix("<!doctype html>\n").replace('<meta charset="utf-8">', "")
    root = ElementTree.fromstring(body)  # noqa: S314 made here
    assert len(list(root.iter("rect"))) == 60
    assert HOSTILE in "".join(root.itertext())


def test_nothing_to_plot_is_no_plot() -> None:
    assert bars("x", [], {}) == ""
    assert "none" in table([], "none")
    assert "rect" in bars("x", ["a"], {"only": [0.0]})
