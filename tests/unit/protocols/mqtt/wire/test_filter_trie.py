"""The filters of a session: additions and removals in any order, and matches as section 4.7 defines them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.protocols.mqtt.wire.test_topics import SMALL_FILTERS, SMALL_NAMES, matches

from basaltmq.protocols.mqtt.wire.filter_trie import FilterTrie


@pytest.mark.mqtt("MQTT-4.7.2-1")
@given(st.lists(st.tuples(st.booleans(), SMALL_FILTERS), max_size=20), st.lists(SMALL_NAMES, min_size=1, max_size=5))
def test_matches_are_those_of_the_filters_that_were_added_and_not_removed(
    steps: list[tuple[bool, str]], names: list[str]
) -> None:
    trie: FilterTrie[tuple[str, int]] = FilterTrie()
    model: dict[str, tuple[str, int]] = {}
    for number, (is_added, topic_filter) in enumerate(steps):
        if is_added:
            model[topic_filter] = (topic_filter, number)
            trie[topic_filter] = model[topic_filter]
        elif topic_filter in model:
            del model[topic_filter]
            del trie[topic_filter]
        else:
            with pytest.raises(KeyError):
                del trie[topic_filter]
    assert len(trie) == len(model)
    for topic in names:
        expected = [value for topic_filter, value in model.items() if matches(topic_filter, topic)]
        assert sorted(trie.match(topic)) == sorted(expected)
    for topic_filter in list(model):
        del trie[topic_filter]
    assert trie._root.is_empty(), "empty branches are pruned"
    assert len(trie) == 0


@pytest.mark.mqtt("MQTT-4.7.2-1")
def test_wildcards_of_the_first_level_do_not_match_names_with_a_dollar() -> None:
    trie: FilterTrie[str] = FilterTrie()
    for topic_filter in ("#", "+/a", "+/#", "$SYS/#", "$SYS/+", "a/+"):
        trie[topic_filter] = topic_filter
    assert sorted(trie.match("$SYS/a")) == ["$SYS/#", "$SYS/+"]
    assert sorted(trie.match("a/$SYS")) == ["#", "+/#", "a/+"]
