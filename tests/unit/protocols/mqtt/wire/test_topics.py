"""Topic names and filters, and that their keys on a topic exchange match as MQTT says."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.unit.protocols.mqtt.wire.strategies import NAMES, filters

from basaltmq.broker.routing.topic_trie import TopicTrie
from basaltmq.protocols.mqtt.wire import reason_codes as rc
from basaltmq.protocols.mqtt.wire import topics
from basaltmq.protocols.mqtt.wire.errors import ProtocolViolation

LEVELS = st.sampled_from(["", "a", "b", "a.b", ".", "*", "%", "%2E", "%25", "%2", "$a", "$SYS"])
SMALL_NAMES = st.lists(LEVELS, min_size=1, max_size=4).map("/".join).filter(bool)
SMALL_FILTERS = (
    st.tuples(st.lists(st.one_of(LEVELS, st.just("+")), max_size=4), st.booleans())
    .map(lambda drawn: "/".join([*drawn[0], *(["#"] if drawn[1] else [])]))
    .filter(bool)
)
"""Few levels, so that names and filters often match."""


def matches(topic_filter: str, topic: str) -> bool:
    """Section 4.7 as a plain definition, to compare with."""
    if topic.startswith("$") and topic_filter[0] in "+#":
        return False
    wanted, given_levels = topic_filter.split("/"), topic.split("/")
    if wanted[-1] == "#":
        wanted = wanted[:-1]
        if len(given_levels) < len(wanted):
            return False
        given_levels = given_levels[: len(wanted)]
    return len(wanted) == len(given_levels) and all(
        one in ("+", other) for one, other in zip(wanted, given_levels, strict=True)
    )


@given(NAMES, NAMES)
@example("a.b", "a/b")
@example("a%2Eb", "a.b")
@example("%25", "%")
@example("%2", "%2")
def test_distinct_names_have_distinct_keys(one: str, other: str) -> None:
    assert (topics.routing_key(one) == topics.routing_key(other)) == (one == other)


@given(st.one_of(NAMES, SMALL_NAMES))
@example("%%2E")
@example("%2.")
@example("/")
def test_keys_are_reversible_and_contain_no_wildcard(topic: str) -> None:
    key = topics.routing_key(topic)
    assert topics.topic_of(key) == topic
    assert "*" not in key
    assert "#" not in key
    assert key.count(".") == topic.count("/")


@pytest.mark.parametrize(
    ("topic", "key"),
    [
        ("sensors/room1/temp", "sensors.room1.temp"),
        ("load/100%", "load.100%"),
        ("v1.2/x", "v1%2E2.x"),
        ("a/*", "a.%2A"),
        ("%2E", "%252E"),
        ("/", "."),
    ],
)
def test_keys_are_as_documented(topic: str, key: str) -> None:
    assert topics.routing_key(topic) == key


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
@example("")
@example("a/b+#\0")
def test_routing_keys_of_amqp_publishers_map_to_topics_with_as_many_levels(key: str) -> None:
    topic = topics.topic_of(key)
    topics.check_name(topic)
    assert topic.count("/") == key.count(".")


@pytest.mark.mqtt("MQTT-4.7.2-1", "MQTT-4.7.3-4")
@given(st.lists(SMALL_FILTERS, min_size=1, max_size=6, unique=True), SMALL_NAMES)
def test_the_exchange_matches_as_mqtt_except_for_hidden_topics(found: list[str], topic: str) -> None:
    trie: TopicTrie[str] = TopicTrie()
    for topic_filter in found:
        topics.check_filter(topic_filter)
        trie.add(topics.binding_key(topic_filter), topic_filter)
    routed = {each for each in trie.match(topics.routing_key(topic)) if not topics.hides(each, topic)}
    assert routed == {each for each in found if matches(each, topic)}


@given(filters(), NAMES)
def test_the_exchange_matches_as_mqtt_for_any_characters(topic_filter: str, topic: str) -> None:
    trie: TopicTrie[str] = TopicTrie()
    trie.add(topics.binding_key(topic_filter), topic_filter)
    routed = bool(trie.match(topics.routing_key(topic))) and not topics.hides(topic_filter, topic)
    assert routed == matches(topic_filter, topic)


@pytest.mark.mqtt("MQTT-4.7.1-1", "MQTT-4.7.1-2", "MQTT-4.7.3-1")
@pytest.mark.parametrize(
    "topic_filter",
    ["#", "+", "a/#", "+/#", "/#", "a/+/b", "+/+", "/", "/+", "$SYS/#", "$share/g/#", "$share/g//", "$shared"],
)
def test_valid_filters(topic_filter: str) -> None:
    topics.check_filter(topic_filter)


@pytest.mark.mqtt("MQTT-4.8.2-1", "MQTT-4.8.2-2")
def test_a_shared_filter_is_split_into_its_name_and_filter() -> None:
    assert topics.split_share("$share/group/a/b/#") == ("group", "a/b/#")
    assert topics.split_share("$share/group//a") == ("group", "/a")
    assert topics.split_share("a/$share/b") == (None, "a/$share/b")
    assert topics.split_share("$shared/a") == (None, "$shared/a")
    for invalid in ("$share", "$share/", "$share/g", "$share/g/", "$share//a", "$share/+/a", "$share/a#/b"):
        with pytest.raises(ProtocolViolation, match="topic filter") as caught:
            topics.split_share(invalid)
        assert caught.value.reason_code == rc.TOPIC_FILTER_INVALID


@pytest.mark.mqtt("MQTT-4.7.0-1", "MQTT-4.7.3-1", "MQTT-4.7.3-2")
@pytest.mark.parametrize("topic", ["", "+", "a/#", "a+b", "a\0b"])
def test_invalid_names(topic: str) -> None:
    with pytest.raises(ProtocolViolation, match="topic name") as caught:
        topics.check_name(topic)
    assert caught.value.reason_code == rc.TOPIC_NAME_INVALID
