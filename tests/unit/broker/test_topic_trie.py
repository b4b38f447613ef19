"""Topic patterns: the trie against the definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.broker.routing.topic_trie import TopicTrie

PATTERNS = st.lists(st.sampled_from(["a", "b", "*", "#", ""]), min_size=1, max_size=5).map(".".join)
KEYS = st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=1, max_size=5).map(".".join)


def matches(pattern: list[str], key: list[str]) -> bool:
    """The definition."""
    if not pattern:
        return not key
    if pattern[0] == "#":
        return any(matches(pattern[1:], key[skipped:]) for skipped in range(len(key) + 1))
    return bool(key) and pattern[0] in ("*", key[0]) and matches(pattern[1:], key[1:])


@pytest.mark.spec("E6")
@given(st.lists(PATTERNS, max_size=12), KEYS)
def test_the_trie_matches_what_the_definition_matches(patterns: list[str], key: str) -> None:
    trie: TopicTrie[str] = TopicTrie()
    for pattern in patterns:
        trie.add(pattern, pattern)
    wanted = {pattern for pattern in patterns if matches(pattern.split("."), key.split("."))}
    assert trie.match(key) == wanted


@given(st.lists(PATTERNS, min_size=1, max_size=12), st.randoms(use_true_random=False), KEYS)
def test_what_is_removed_matches_no_more_and_leaves_nothing(
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
    assert trie._root.is_empty()


def test_many_hashes_in_a_row_cost_no_more_than_their_number() -> None:
    trie: TopicTrie[int] = TopicTrie()
    trie.add(".".join(["#", "a"] * 12 + ["b"]), 1)
    assert trie.match(".".join(["a"] * 200)) == set()
    assert trie.match(".".join(["a"] * 200 + ["b"])) == {1}
