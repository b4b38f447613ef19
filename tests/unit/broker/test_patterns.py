"""Patterns of names: matching time is bounded for every pattern, and unsupported syntax is refused by name."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from basaltmq.broker.auth.patterns import PATTERN_BYTES_MAX, compiled, escaped, stored
from basaltmq.errors import InvalidArgumentError

USUAL = [
    "",
    ".*",
    "^$",
    "^amq\\.",
    "^(orders|orders-dlq|payments)$",
    "^(eu|us)-.*",
    "(a|b)*",
    "^(?:tenant-[0-9]{1,6}\\.)?queue\\..+$",
    "(?i)^Ünïcode\\.",
    "^[a-z]+\\.[a-z]+\\.[a-z]+$",
    "^\\Qa.b\\E$",
    "^[[:alpha:]]+$",
]
EXPONENTIAL = [
    "^(a{1,16}){1,16}b",
    "(\\w{1,16}\\.?){1,16}$",
    "(?:a|a){16}b",
    "(a+)+$",
    "(\\w*x?)*$",
    "(a|ab)*c",
    "(.*a){20}b",
    "(a?){64}a{64}b",
]
"""With these patterns and the names below, a backtracking engine runs for minutes or does not terminate."""

MATCH_ALL = """
import sys
from basaltmq.broker.routing.policy import Policies, Policy
from basaltmq.protocols.kafka.groups.topic_pattern import TopicPattern
from basaltmq.store.memory import MemoryStore

pattern = sys.argv[1]
names = ["a" * 255, "a." * 127, "a" * 254 + "!"]
topics = TopicPattern(pattern, lambda name: True)
policies = Policies(MemoryStore())
policies.set(Policy("p", pattern, {"max-length": 1}))
for name in names:
    topics.matches(name)
    policies.of_queue(name, "classic")
"""


@pytest.mark.promise("P13")
@pytest.mark.parametrize("pattern", EXPONENTIAL)
def test_no_pattern_blocks_a_subscription_or_a_policy(pattern: str) -> None:
    """Runs in a separate process, because a match that hangs cannot be interrupted."""
    subprocess.run([sys.executable, "-c", MATCH_ALL, pattern], timeout=30, check=True)


@pytest.mark.spec("E9")
@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns_are_accepted(pattern: str) -> None:
    assert compiled(pattern, "it").text == pattern


def test_search_finds_substrings_and_full_match_needs_the_whole_name() -> None:
    pattern = compiled("orders", "it")
    assert pattern.is_in("eu.orders.1")
    assert not pattern.is_all_of("eu.orders.1")
    assert pattern.is_all_of("orders")


def test_quoted_text_is_literal() -> None:
    pattern = compiled("\\Qa.b\\E.*", "it")
    assert pattern.is_all_of("a.b-c")
    assert not pattern.is_all_of("axb-c")


@pytest.mark.parametrize("name", ["a.b", "x y", "(é)", "a\\b", "nul\0", "[a-z]"])
def test_an_escaped_name_matches_itself_only(name: str) -> None:
    pattern = compiled(escaped(name), "it")
    assert pattern.is_all_of(name)
    assert not pattern.is_all_of(name + "x")


@pytest.mark.parametrize("name", ["\ud800", "a\udcffb"])
def test_names_that_are_not_valid_unicode_can_be_matched(name: str) -> None:
    assert compiled(".*", "it").is_in(name)
    assert not compiled("^orders$", "it").is_in(name)


@pytest.mark.parametrize(
    "pattern", ["(", "[z-a]", "a{5,2}", "*", "(?P<n", "x" * (PATTERN_BYTES_MAX + 1), "(" * 900, "\ud800", 7]
)
def test_invalid_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgumentError, match="the pattern of policy 'p'"):
        compiled(pattern, "the pattern of policy 'p'")


@pytest.mark.parametrize("pattern", ["^(?!amq\\.).*", "(?=a)b", "(?<=a)b", "(?<!a)b", "(a)\\1", "(?P<n>a)(?P=n)"])
def test_lookaround_and_backreferences_are_refused_with_the_remedy(pattern: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"not supported.*write a pattern without them"):
        compiled(pattern, "it")


@pytest.mark.parametrize("pattern", ["(a{1,900}){1,900}", "(?i:\\pL{0,30}x){30}", "((a{99}){99}){99}"])
def test_a_pattern_beyond_the_memory_limit_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgumentError, match="too large"):
        compiled(pattern, "it")


def test_a_stored_pattern_that_cannot_be_compiled_matches_nothing_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        pattern = stored("^(?!amq\\.).*", "the pattern of policy 'old'")
    assert not pattern.is_in("orders")
    assert not pattern.is_all_of("orders")
    assert "policy 'old'" in caplog.text
    assert "matches nothing until it is changed" in caplog.text
