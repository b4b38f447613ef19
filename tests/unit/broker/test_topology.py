"""Exchanges and bindings: routing, refusals, and restarts."""

from __future__ import annotations

from typing import Any

import pytest

from basaltmq.broker.routing.exchange import EXCHANGE, QUEUE, Destination
from basaltmq.broker.routing.topology import Topology
from basaltmq.errors import (
    AccessRefusedError,
    CorruptionError,
    ExchangeNotFoundError,
    InvalidArgumentError,
    NotFoundError,
    PreconditionFailedError,
    UnknownExchangeTypeError,
)
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.broker import exchange_key
from basaltmq.store.memory import MemoryStore

QUEUES = {"q1", "q2", "q3"}


def topology(store: MemoryStore | None = None) -> Topology:
    return Topology(store or MemoryStore(), "/", has_queue=QUEUES.__contains__)


def bind(here: Topology, source: str, name: str, key: str = "", arguments: dict[str, Any] | None = None) -> bool:
    return here.bind(source, Destination(QUEUE, name), key, arguments, durable=True)


def link(here: Topology, source: str, name: str, key: str = "") -> bool:
    return here.bind(source, Destination(EXCHANGE, name), key, None, durable=True)


def reached(here: Topology, exchange: str, key: str = "", headers: dict[str, Any] | None = None) -> list[str]:
    return sorted(here.route(here.get(exchange), [key], headers or {})[0])


@pytest.mark.spec("E6")
def test_the_default_exchange_routes_to_the_queue_of_the_key() -> None:
    here = topology()
    assert reached(here, "", "q1") == ["q1"]
    assert reached(here, "", "nobody") == []


@pytest.mark.spec("E6")
def test_each_exchange_type_matches_its_bindings() -> None:
    here = topology()
    bind(here, "amq.direct", "q1", "a")
    bind(here, "amq.direct", "q2", "a")
    bind(here, "amq.fanout", "q1", "x")
    bind(here, "amq.fanout", "q3")
    bind(here, "amq.topic", "q1", "a.#")
    bind(here, "amq.topic", "q2", "*.b")
    assert reached(here, "amq.direct", "a") == ["q1", "q2"]
    assert reached(here, "amq.direct", "b") == []
    assert reached(here, "amq.fanout", "whatever") == ["q1", "q3"]
    assert reached(here, "amq.topic", "a.b") == ["q1", "q2"]
    assert reached(here, "amq.topic", "a") == ["q1"]


@pytest.mark.parametrize(
    ("mode", "headers", "is_met"),
    [
        ("all", {"a": 1, "b": "x"}, True),
        ("all", {"a": 1}, False),
        ("all", {"a": 1, "b": "x", "x-own": "other"}, True),
        ("any", {"a": 1}, True),
        ("any", {"a": True}, False),
        ("any", {"b": "y"}, False),
        ("all-with-x", {"a": 1, "b": "x"}, False),
        ("all-with-x", {"a": 1, "b": "x", "x-own": "v"}, True),
        ("any-with-x", {"x-own": "v"}, True),
        ("any", {"x-own": "v"}, False),
        (None, {"a": 1, "b": "x"}, True),
        (None, {"b": "x"}, False),
    ],
)
@pytest.mark.spec("E6")
def test_headers_exchanges_match_by_their_mode(mode: str | None, headers: dict[str, Any], is_met: bool) -> None:
    here = topology()
    arguments: dict[str, Any] = {"a": 1, "b": "x", "x-own": "v"}
    if mode is not None:
        arguments["x-match"] = mode
    bind(here, "amq.headers", "q1", "", arguments)
    assert reached(here, "amq.headers", "", headers) == (["q1"] if is_met else [])


def test_a_binding_header_without_a_value_matches_any_value() -> None:
    here = topology()
    bind(here, "amq.match", "q1", "", {"a": None})
    assert reached(here, "amq.match", "", {"a": "anything"}) == ["q1"]
    assert reached(here, "amq.match", "", {}) == []


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(PreconditionFailedError, match="x-match"):
        bind(topology(), "amq.headers", "q1", "", {"x-match": "most"})


@pytest.mark.spec("E6")
def test_exchange_bindings_in_a_cycle_end() -> None:
    here = topology()
    for name in ("one", "two", "three"):
        here.declare(name, "fanout")
    link(here, "one", "two")
    link(here, "two", "three")
    link(here, "three", "one")
    bind(here, "three", "q1")
    bind(here, "one", "q1")
    bind(here, "two", "q2")
    assert reached(here, "one") == reached(here, "two") == reached(here, "three") == ["q1", "q2"]


@pytest.mark.spec("E6")
def test_unrouted_messages_go_to_the_alternate_exchange_and_its_alternate() -> None:
    here = topology()
    here.declare("last", "fanout")
    here.declare("middle", "direct", arguments={"alternate-exchange": "last"})
    here.declare("first", "direct", arguments={"alternate-exchange": "middle"})
    bind(here, "first", "q1", "a")
    bind(here, "middle", "q2", "b")
    bind(here, "last", "q3")
    assert reached(here, "first", "a") == ["q1"]
    assert reached(here, "first", "b") == ["q2"]
    assert reached(here, "first", "c") == ["q3"]


def test_cyclic_or_missing_alternate_exchanges_end_without_a_route() -> None:
    here = topology()
    here.declare("left", "direct", arguments={"alternate-exchange": "right"})
    here.declare("right", "direct", arguments={"alternate-exchange": "left"})
    here.declare("lost", "direct", arguments={"alternate-exchange": "nowhere"})
    assert reached(here, "left", "a") == [] == reached(here, "lost", "a")


def test_routing_reports_whether_headers_mattered_also_through_another_exchange() -> None:
    here = topology()
    here.declare("front", "fanout")
    bind(here, "front", "q1")
    assert here.route(here.get("front"), ["k"], {})[1] is False
    link(here, "front", "amq.headers")
    assert here.route(here.get("front"), ["k"], {})[1] is True


@pytest.mark.promise("P10")
def test_durable_exchanges_and_bindings_survive_and_others_do_not() -> None:
    store = MemoryStore()
    here = topology(store)
    here.declare("kept", "topic", internal=True, auto_delete=True, arguments={"alternate-exchange": "amq.fanout"})
    here.declare("lost", "topic", durable=False)
    bind(here, "kept", "q1", "a.*", {"x": 1})
    bind(here, "lost", "q1", "a")
    here.bind("kept", Destination(QUEUE, "q2"), "a.*", None, durable=False)
    again = topology(store)
    assert again.load(QUEUES.__contains__) == []
    kept = again.get("kept")
    assert (kept.type, kept.internal, kept.auto_delete, kept.alternate) == ("topic", True, True, "amq.fanout")
    assert reached(again, "kept", "a.b") == ["q1"]
    assert [dict(each.arguments) for each in again.bindings()] == [{"x": 1}]
    with pytest.raises(ExchangeNotFoundError):
        again.get("lost")
    again.delete("kept")
    third = topology(store)
    third.load(QUEUES.__contains__)
    assert "kept" not in third.exchanges
    assert list(third.bindings()) == []


def test_a_stored_binding_without_its_queue_is_reported_and_removed() -> None:
    store = MemoryStore()
    bind(topology(store), "amq.direct", "q1", "a")
    again = topology(store)
    assert len(again.load({"q2"}.__contains__)) == 1
    assert list(again.bindings()) == []
    third = topology(store)
    assert third.load(QUEUES.__contains__) == []
    assert list(third.bindings()) == [], "a queue made again under the name does not get it back"


def test_a_damaged_row_is_reported_with_its_exchange() -> None:
    store = MemoryStore()
    batch = Batch()
    batch.put(Family.TOPOLOGY, exchange_key("bad"), b"\x01")
    store.write(batch)
    with pytest.raises(CorruptionError, match="bad"):
        topology(store).load(QUEUES.__contains__)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("type", {"kind": "fanout"}),
        ("durable", {"durable": False}),
        ("auto_delete", {"auto_delete": True}),
        ("internal", {"internal": True}),
        ("alternate-exchange", {"arguments": {"alternate-exchange": "x"}}),
    ],
)
def test_redeclaring_an_exchange_differently_names_the_difference(field: str, given: dict[str, Any]) -> None:
    here = topology()
    here.declare("x", "direct")
    here.declare("x", "direct")
    asked = {"kind": "direct", **given}
    with pytest.raises(PreconditionFailedError, match=f"inequivalent arg '{field}' for exchange 'x' in vhost '/'"):
        here.declare("x", **asked)


def test_reserved_unknown_and_too_long_names_are_refused() -> None:
    here = topology()
    with pytest.raises(AccessRefusedError, match="reserved prefix"):
        here.declare("amq.mine", "direct")
    with pytest.raises(AccessRefusedError, match="reserved prefix"):
        here.delete("amq.direct")
    with pytest.raises(AccessRefusedError, match="default exchange"):
        bind(here, "", "q1", "q1")
    with pytest.raises(UnknownExchangeTypeError, match="unknown exchange type"):
        here.declare("x", "roundabout")
    with pytest.raises(ExchangeNotFoundError, match="no exchange 'x' in vhost '/'"):
        here.declare("x", "direct", passive=True)
    with pytest.raises(InvalidArgumentError):
        here.declare("x" * 256, "direct")
    with pytest.raises(NotFoundError, match="no queue 'nobody'"):
        bind(here, "amq.direct", "nobody")
    with pytest.raises(PreconditionFailedError, match="alternate-exchange"):
        here.declare("x", "direct", arguments={"alternate-exchange": 1})


def test_repeated_bindings_are_one_unless_their_arguments_differ() -> None:
    here = topology()
    assert bind(here, "amq.topic", "q1", "a", {"x": 1, "y": 2})
    assert not bind(here, "amq.topic", "q1", "a", {"y": 2, "x": 1})
    assert bind(here, "amq.topic", "q1", "a", {"x": 2})
    assert here.unbind("amq.topic", Destination(QUEUE, "q1"), "a", {"x": 1, "y": 2}) is not None
    assert reached(here, "amq.topic", "a") == ["q1"]
    assert here.unbind("amq.topic", Destination(QUEUE, "q1"), "a", {"x": 2}) is not None
    assert here.unbind("amq.topic", Destination(QUEUE, "q1"), "a", {"x": 2}) is None
    assert reached(here, "amq.topic", "a") == []


@pytest.mark.promise("P10")
def test_deleted_bindings_do_not_return_after_a_restart() -> None:
    store = MemoryStore()
    here = topology(store)
    for name in ("q1", "q2", "q3"):
        bind(here, "amq.direct", name, "a")
    here.unbind("amq.direct", Destination(QUEUE, "q1"), "a", None)
    here.remove_queue("q2")
    again = topology(store)
    assert again.load(QUEUES.__contains__) == []
    assert reached(again, "amq.direct", "a") == ["q3"]


def test_an_auto_delete_exchange_is_deleted_with_its_last_binding_and_the_bindings_to_it() -> None:
    store = MemoryStore()
    here = topology(store)
    here.declare("front", "fanout", auto_delete=True)
    here.declare("back", "fanout", auto_delete=True)
    link(here, "front", "back")
    bind(here, "back", "q1")
    bind(here, "back", "q2")
    here.remove_queue("q1")
    assert "back" in here.exchanges
    here.remove_queue("q2")
    assert "back" not in here.exchanges
    assert "front" not in here.exchanges
    again = topology(store)
    again.load(QUEUES.__contains__)
    assert "back" not in again.exchanges
    assert "front" not in again.exchanges


@pytest.mark.promise("P2", "P10")
def test_deleting_an_exchange_deletes_its_auto_delete_sources_in_memory_and_on_disk() -> None:
    store = MemoryStore()
    here = topology(store)
    here.declare("first", "fanout", auto_delete=True)
    here.declare("second", "fanout", auto_delete=True)
    here.declare("target", "fanout")
    link(here, "first", "second")
    link(here, "second", "target")
    before = store.writes()
    here.delete("target")
    assert store.writes() == before + 1, "one operation is one batch"
    again = topology(store)
    again.load(QUEUES.__contains__)
    assert set(here.exchanges) == set(again.exchanges)
    assert "first" not in here.exchanges


@pytest.mark.promise("P10")
def test_a_binding_lost_in_a_crash_deletes_its_auto_delete_exchange() -> None:
    store = MemoryStore()
    here = topology(store)
    here.declare("front", "fanout", auto_delete=True)
    here.declare("back", "fanout", auto_delete=True)
    link(here, "front", "back")
    bind(here, "back", "q1")
    again = topology(store)
    assert len(again.load({"q2"}.__contains__)) == 1
    assert not {"front", "back"} & set(again.exchanges)
    third = topology(store)
    assert third.load(QUEUES.__contains__) == []
    assert set(third.exchanges) == set(again.exchanges)


def test_a_queue_that_is_not_served_keeps_its_bindings() -> None:
    store = MemoryStore()
    here = topology(store)
    here.declare("x", "fanout", auto_delete=True)
    bind(here, "x", "q1")
    again = topology(store)
    lines = again.load({"q2", "q3"}.__contains__, {"q1"}.__contains__)
    assert len(lines) == 1
    assert "not served" in lines[0]
    assert reached(again, "x") == []
    third = topology(store)
    assert third.load(QUEUES.__contains__) == []
    assert reached(third, "x") == ["q1"]


def test_if_unused_keeps_an_exchange_in_use() -> None:
    here = topology()
    here.declare("x", "fanout")
    bind(here, "x", "q1")
    with pytest.raises(PreconditionFailedError, match="in use"):
        here.delete("x", if_unused=True)
    assert here.delete("x")
    assert not here.delete("x")
