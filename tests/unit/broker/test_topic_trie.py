"""Topic patterns: the trie compared with the definition."""

from __future__ import annotations

import sys
from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.broker.routing.topic_trie import TopicTrie

PATTERNS = st.lists(st.sampled_from(["a", "b", "*", "#", ""]), min_size=1, max_size=12).map(".".join)
KEYS = st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=1, max_size=12).map(".".join)


def matches(pattern: list[str], key: list[str]) -> bool:
    """Match the rest of a pattern and of a key by the definition."""

    @cache
    def rest(at: int, word: int) -> bool:
        if at == len(pattern):
            return word == len(key)
        if pattern[at] == "#":
            return any(rest(at + 1, later) for later in range(word, len(key) + 1))
        return word < len(key) and pattern[at] in ("*", key[word]) and rest(at + 1, word + 1)

    return rest(0, 0)


@pytest.mark.spec("E6")
@given(st.lists(PATTERNS, max_size=12), KEYS)
def test_the_trie_matches_as_the_definition(patterns: list[str], key: str) -> None:
    trie: TopicTrie[str] = TopicTrie()
    for pattern in patterns:
        trie.add(pattern, pattern)
    wanted = {pattern for pattern in patterns if matches(pattern.split("."), key.split("."))}
    assert trie.match(key) == wanted


@given(st.lists(PATTERNS, min_size=1, max_size=12), st.randoms(use_true_random=False), KEYS)
def test_removed_patterns_match_nothing_and_leave_no_nodes(
    patterns: list[str], random: st.DataObject, key: str
) -> None:
    trie: TopicTrie[str] = TopicTrie()
    for pattern in patterns:
        trie.add(pattern, "queue")
    left = list(patterns)
    random.shuffle(left)  # type: ignore[attr-defined]
    while left:
        trie.remove(left.pop(), "queue")
        wanted = any(matches(pattern.split("."), key.split(".")) for pattern in left)
        assert trie.match(key) == ({"queue"} if wanted else set())
    assert trie.is_empty()


def test_consecutive_hashes_cost_linear_time() -> None:
    trie: TopicTrie[int] = TopicTrie()
    trie.add(".".join(["#", "a"] * 12 + ["b"]), 1)
    assert trie.match(".".join(["a"] * 200)) == set()
    assert trie.match(".".join(["a"] * 200 + ["b"])) == {1}


def test_many_long_patterns_allocate_and_free_several_blocks() -> None:
    choose = Random(7)
    patterns = {".".join(choose.choices(["a", "b", "*", "#"], k=choose.randint(2, 40))) for _ in range(150)}
    trie: TopicTrie[str] = TopicTrie()
    for pattern in patterns:
        trie.add(pattern, pattern)
    keys = [".".join(choose.choices("ab", k=choose.randint(1, 40))) for _ in range(12)]
    left = sorted(patterns)
    while True:
        for key in keys:
            assert trie.match(key) == {each for each in left if matches(each.split("."), key.split("."))}
        if not left:
            break
        choose.shuffle(left)
        for pattern in left[:50]:
            trie.remove(pattern, pattern)
        left = left[50:]
    assert trie.is_empty()


@pytest.mark.promise("P13")
@pytest.mark.parametrize("first", ["#", "*"])
def test_matching_hostile_patterns_takes_few_steps(first: str) -> None:
    """1,000 patterns, each at all of its words at once, took 5 s in the trie, on the event loop."""
    choose = Random(3)
    trie: TopicTrie[int] = TopicTrie()
    for number in range(300):
        trie.add(".".join([first, *choose.choices("a*", k=126)]), number)
    key = ".".join("a" * 127)
    steps = 0

    def count(*_: object) -> Any:
        nonlocal steps
        steps += 1
        return count

    sys.settrace(count)
    try:
        found = trie.match(key)
    finally:
        sys.settrace(None)
    assert len(found) == 300
    assert steps < 60_000, "lines of Python; a trie of nodes needs 16 million"
