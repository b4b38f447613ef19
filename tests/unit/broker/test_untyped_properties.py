"""Selectors on properties without a type: a number where the other operand is one."""

from __future__ import annotations

import pytest

from basaltmq.broker.selectors.conditions import Untyped
from basaltmq.broker.selectors.parser import parse


@pytest.mark.spec("G3")
@pytest.mark.parametrize(
    ("text", "accepts"),
    [
        ("n = 5", True),
        ("n = '5'", True),
        ("n <> 5", False),
        ("n = 5.0", True),
        ("n > 4 AND n <= 5", True),
        ("n + 1 = 6", True),
        ("-n < 0", True),
        ("n IN (5, 6)", True),
        ("n IN ('5')", True),
        ("n IN (6, '7')", False),
        ("word > 4", False),
        ("word = 5", False),
        ("word <> 5", True),
        ("flag = TRUE", True),
        ("flag = FALSE", False),
        ("n = TRUE", False),
        ("n LIKE '5%'", True),
        ("huge > 1", False),
        ("n = other", True),
        ("nothing = 5", False),
    ],
)
def test_an_untyped_property_has_the_type_of_the_other_operand(text: str, accepts: bool) -> None:
    values = {"n": "5", "other": "5", "word": "red", "flag": "true", "huge": "1e999"}

    def look_up(name: str) -> Untyped | None:
        return Untyped(values[name]) if name in values else None

    assert parse(text).accepts(look_up) is accepts
