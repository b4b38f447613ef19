"""Selectors: the conditions of JMS, with three-valued logic."""

from __future__ import annotations

import random
from typing import Any

import pytest

from basaltmq.broker.selectors.conditions import LIKE_STEPS_MAX
from basaltmq.broker.selectors.parser import DEPTH_MAX, TEXT_BYTES_MAX, parse
from basaltmq.errors import InvalidArgumentError

MESSAGE: dict[str, Any] = {
    "color": "red",
    "weight": 2500,
    "ratio": 0.5,
    "hot": True,
    "x-kind": "a_b%c",
    "quote": "it's",
    "minus": -7,
    "empty": "",
    "JMSType": "car",
}


@pytest.mark.spec("G2")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("JMSType = 'car' AND color = 'red' AND weight >= 2500", True),
        ("color = 'blue'", False),
        ("color <> 'blue'", True),
        ("color != 'blue'", True),
        ("color = weight", False),
        ("weight <> 'x'", True),
        ("hot", True),
        ("NOT hot", False),
        ("hot = TRUE", True),
        ("hot = 1", False),
        ("unknown = 1", False),
        ("NOT (unknown = 1)", False),
        ("unknown = 1 OR hot", True),
        ("unknown = 1 AND hot", False),
        ("NOT (unknown = 1 AND FALSE)", True),
        ("unknown IS NULL", True),
        ("color IS NULL", False),
        ("color IS NOT NULL", True),
        ("weight BETWEEN 2500 AND 2600", True),
        ("weight NOT BETWEEN 2500 AND 2600", False),
        ("unknown BETWEEN 1 AND 2", False),
        ("unknown NOT BETWEEN 1 AND 2", False),
        ("color IN ('green', 'red')", True),
        ("color NOT IN ('green', 'red')", False),
        ("unknown IN ('green')", False),
        ("unknown NOT IN ('green')", False),
        ("weight IN (1, 2500)", True),
        ("minus IN (-7)", True),
        ("hot IN (1)", False),
        ("color LIKE 'r%'", True),
        ("color LIKE 'r_d'", True),
        ("color LIKE 'r_'", False),
        ("color NOT LIKE 'b%'", True),
        ("unknown LIKE '%'", False),
        ("unknown NOT LIKE '%'", False),
        ("weight LIKE '2%'", False),
        ("\"x-kind\" LIKE 'a!_b!%c' ESCAPE '!'", True),
        ("\"x-kind\" LIKE 'a!_c%' ESCAPE '!'", False),
        ("weight-weight = 0", True),
        ("quote = 'it''s'", True),
        ("color LIKE '.*'", False),
        ("empty LIKE '%'", True),
        ("weight + 1 = 2501", True),
        ("weight - 1 = 2499", True),
        ("weight -1 = 2499", True),
        ("weight-1 = 2499", True),
        ("2 + 3 * 4 = 14", True),
        ("(2 + 3) * 4 = 20", True),
        ("-weight = -2500", True),
        ("minus / 2 = -3", True),
        ("weight / 0 = 1", False),
        ("NOT (weight / 0 = 1)", False),
        ("ratio * 2 = 1", True),
        ("ratio = 5e-1", True),
        ("ratio = .5", True),
        ("weight = 0x9C4", True),
        ("weight = 2500L", True),
        ("weight < 2500.5", True),
        ("color = 'blue' OR color = 'red' AND weight = 1", False),
        ("(color = 'blue' OR color = 'red') AND weight = 2500", True),
        ("not color = 'blue' and hot", True),
    ],
)
def test_conditions(text: str, expected: bool) -> None:
    assert parse(text).accepts(MESSAGE.get) is expected


@pytest.mark.spec("G2")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "color =",
        "= 1",
        "1",
        "'a'",
        "1 + 1",
        "color = 'red",
        "color LIKE 5",
        "color LIKE 'a!' ESCAPE '!'",
        "color LIKE 'a' ESCAPE 'ab'",
        "5 LIKE '5'",
        "color IN ()",
        "color IN ('a',)",
        "a BETWEEN 1",
        "'a' + 1 = 2",
        "TRUE + 1 = 2",
        "TRUE < FALSE",
        "color < 'z'",
        "hot > FALSE",
        "1 AND 2",
        "color NOT 'a'",
        "a = 1 b = 2",
        "a ~ 1",
        "NULL = a",
        "(a = 1",
        "a = 1)",
        "NOT",
        "('a' = 'b') > 1",
        "9" * 100 + " = a",
        "(" * (DEPTH_MAX + 1) + "TRUE" + ")" * (DEPTH_MAX + 1),
        "NOT " * (DEPTH_MAX + 1) + "TRUE",
        "a = " + "-" * (DEPTH_MAX + 1) + "1",
        "a = '" + "x" * TEXT_BYTES_MAX + "'",
        "a = 1 OR " * 500 + "a = 1",
    ],
)
def test_what_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse(text)


@pytest.mark.spec("G2")
def test_a_hostile_pattern_ends() -> None:
    # A backtracking engine would not terminate.
    assert not parse("a LIKE '" + "%a" * 200 + "b'").accepts({"a": "a" * 60_000}.get)


@pytest.mark.spec("G2")
def test_names_are_known() -> None:
    assert parse("a = 1 AND \"b c\" IS NULL OR JMSType LIKE 'x'").names == {"a", "b c", "JMSType"}


@pytest.mark.spec("G2")
def test_random_words_never_raise_anything_else() -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    words = ["a", "b", "'x'", "1", "-2", "3.5", "=", "<>", "<", "(", ")", "AND", "OR", "NOT", "IN", "LIKE", "ESCAPE"]
    words += ["BETWEEN", "IS", "NULL", "TRUE", ",", "+", "-", "*", "/", "'%'", '"q"', "§"]
    valid = 0
    for _ in range(5_000):
        text = " ".join(chance.choice(words) for _ in range(chance.randrange(1, 9)))
        try:
            found = parse(text)
        except InvalidArgumentError:
            continue
        valid += 1
        for message in ({}, {"a": 1, "b": "x"}, {"a": True, "b": 2.5, "q": ""}):
            assert found.accepts(message.get) in (True, False), (seed, text)
    assert valid, seed


@pytest.mark.promise("P13")
def test_long_texts_and_many_patterns_are_not_compared() -> None:
    selector = parse("x LIKE '%a_b%'")
    longest = "-" * (LIKE_STEPS_MAX // len("%a_b%") - 3)
    assert selector.accepts({"x": longest + "a-b"}.get)
    assert not selector.accepts({"x": longest + "-a-b"}.get)
    assert not parse("x NOT LIKE '%a_b%'").accepts({"x": longest * 2}.get), "unknown"
    assert parse("x NOT LIKE '%a_b%' OR x IS NOT NULL").accepts({"x": longest * 2}.get)
    several = " OR ".join(["x LIKE '%a_b%'"] * 10)
    assert not parse(several).accepts({"x": longest + "a-b"}.get), "all patterns together take their time"
    with pytest.raises(InvalidArgumentError, match="1024 bytes"):
        parse("x LIKE '" + "a" * 600 + "' OR x LIKE '" + "b" * 600 + "'")
