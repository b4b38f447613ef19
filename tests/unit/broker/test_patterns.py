"""Patterns for names: what could hold the loop is refused, what people write is taken."""

from __future__ import annotations

import subprocess
import sys

import pytest

from basaltmq.broker.patterns import PATTERN_BYTES_MAX, compiled
from basaltmq.errors import InvalidArgumentError

USUAL = [
    "",
    ".*",
    "^$",
    "^amq\\.",
    "^(?!amq\\.).*",
    "^(orders|orders-dlq|payments)$",
    "^(eu|us)-.*",
    "(a|b)*",
    "^(?:tenant-[0-9]{1,6}\\.)?queue\\..+$",
    "(?i)^Ünïcode\\.",
    "^[a-z]+\\.[a-z]+\\.[a-z]+$",
    "^a.*|^b.*|^c.*|^d.*|^e.*",
    "^(a.*|b.+|c.*|d.*)$",
]
ENDLESS = [
    "(a+)+$",
    "(a*)*$",
    "(\\w*x?)*$",
    "(a|a)*$",
    "(a|ab)*c",
    "((a|b)+)+$",
    "(.*a){20}",
    ".*.*.*.*x",
    "(a?){64}a{64}",
    "(a.*|b.*|c.*|d.*)x.*",
    "(a.*|b.*)(c.*|d.*)",
    "(a.*|b.*|c.*|d.*)*",
    "a.*b.*|c.*d.*",
]


@pytest.mark.spec("E9")
@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns_are_taken_as_they_are(pattern: str) -> None:
    assert compiled(pattern, "it").pattern == pattern


@pytest.mark.spec("E9")
@pytest.mark.parametrize("pattern", ENDLESS)
def test_patterns_that_could_take_for_ever_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgumentError, match="the pattern of policy 'p'"):
        compiled(pattern, "the pattern of policy 'p'")


@pytest.mark.parametrize("pattern", ["(", "[z-a]", "a{5,2}", "*", "(?P<n", "x" * (PATTERN_BYTES_MAX + 1), "(" * 900])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgumentError, match="it"):
        compiled(pattern, "it")


def test_such_a_pattern_does_take_for_ever() -> None:
    """What is refused is refused for a reason: the engine is still one that tries everything."""
    work = "import re; re.compile('(a+)+$').search('a' * 60 + '!')"
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-c", work], timeout=0.5, check=True)


def test_the_slowest_pattern_taken_ends_on_the_longest_name() -> None:
    assert compiled(".*a.*b.*c", "it").search("ab" * 127 + "a") is None
