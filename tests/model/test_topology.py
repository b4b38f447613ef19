"""Exchanges and bindings against a model: memory, disk and model are equal after every operation (P2, P10)."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from basaltmq.broker.routing.exchange import EXCHANGE, QUEUE, Destination
from basaltmq.broker.routing.topology import Topology
from basaltmq.store.memory import MemoryStore

QUEUES = ("durable", "transient")
DECLARED = ("a", "b", "c")
EXCHANGES = (*DECLARED, "amq.fanout")
KEYS = ("", "k")


class Bound(NamedTuple):
    """A binding of the model."""

    source: str
    destination: Destination
    key: str


class Settings(NamedTuple):
    """An exchange of the model."""

    durable: bool
    auto_delete: bool


class TopologyMachine(RuleBasedStateMachine):
    @initialize(auto_delete=st.tuples(*[st.booleans()] * len(DECLARED)))
    def begin(self, auto_delete: tuple[bool, ...]) -> None:
        self.store = MemoryStore()
        self.exchanges = {"amq.fanout": Settings(True, False)}
        self.bindings: set[Bound] = set()
        self.here = self.opened()
        for name, flag in zip(DECLARED, auto_delete, strict=True):
            self.declare(name, True, flag)

    def opened(self) -> Topology:
        here = Topology(self.store, "/", has_queue=QUEUES.__contains__)
        lost = here.load("durable".__eq__)
        assert lost == [], "every binding row has both ends"
        return here

    def is_durable(self, destination: Destination) -> bool:
        if destination.kind == QUEUE:
            return destination.name == "durable"
        return self.exchanges[destination.name].durable

    def remove(self, bindings: set[Bound]) -> None:
        """Remove bindings, and auto-delete exchanges that lost their last one, until nothing changes."""
        self.bindings -= bindings
        for source in {each.source for each in bindings}:
            mine = self.exchanges.get(source)
            if mine is not None and mine.auto_delete and not any(each.source == source for each in self.bindings):
                self.remove_exchange(source)

    def remove_exchange(self, name: str) -> None:
        del self.exchanges[name]
        self.bindings = {each for each in self.bindings if each.source != name}
        self.remove({each for each in self.bindings if each.destination == Destination(EXCHANGE, name)})

    @rule(name=st.sampled_from(DECLARED), durable=st.booleans(), auto_delete=st.booleans())
    def declare(self, name: str, durable: bool, auto_delete: bool) -> None:
        if name not in self.exchanges:
            self.here.declare(name, "fanout", durable=durable, auto_delete=auto_delete)
            self.exchanges[name] = Settings(durable, auto_delete)

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def bind(self, data: st.DataObject, key: str) -> None:
        source = data.draw(st.sampled_from(sorted(self.exchanges)))
        destination = data.draw(
            st.sampled_from(
                [
                    *(Destination(EXCHANGE, name) for name in sorted(self.exchanges)),
                    *(Destination(QUEUE, name) for name in QUEUES),
                ]
            )
        )
        made = self.here.bind(source, destination, key, None, durable=self.is_durable(destination))
        assert made == (Bound(source, destination, key) not in self.bindings)
        self.bindings.add(Bound(source, destination, key))

    @rule(data=st.data())
    def unbind(self, data: st.DataObject) -> None:
        if self.bindings:
            chosen = data.draw(st.sampled_from(sorted(self.bindings)))
            before = self.store.writes()
            assert self.here.unbind(chosen.source, chosen.destination, chosen.key, None) is not None
            assert self.store.writes() - before <= 1
            self.remove({chosen})

    @rule(name=st.sampled_from(DECLARED))
    def delete(self, name: str) -> None:
        before = self.store.writes()
        assert self.here.delete(name) == (name in self.exchanges)
        assert self.store.writes() - before <= 1
        if name in self.exchanges:
            self.remove_exchange(name)

    @rule(name=st.sampled_from(QUEUES))
    def remove_queue(self, name: str) -> None:
        before = self.store.writes()
        self.here.remove_queue(name)
        assert self.store.writes() - before <= 1
        self.remove({each for each in self.bindings if each.destination == Destination(QUEUE, name)})

    @rule()
    def restart(self) -> None:
        self.exchanges, self.bindings = self.surviving()
        self.here = self.opened()

    def surviving(self) -> tuple[dict[str, Settings], set[Bound]]:
        return (
            {name: each for name, each in self.exchanges.items() if each.durable},
            {
                each
                for each in self.bindings
                if self.exchanges[each.source].durable and self.is_durable(each.destination)
            },
        )

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "here"):
            return
        compare(self.here, self.exchanges, self.bindings)
        compare(self.opened(), *self.surviving())


def compare(here: Topology, exchanges: dict[str, Settings], bindings: set[Bound]) -> None:
    found = {
        name: Settings(each.durable, each.auto_delete)
        for name, each in here.exchanges.items()
        if name in EXCHANGES and name
    }
    assert found == exchanges
    assert {Bound(each.source, each.destination, each.routing_key) for each in here.bindings()} == bindings
    targets = {each.destination for each in bindings}
    incoming = {
        Bound(each.source, each.destination, each.routing_key) for to in targets for each in here.bindings_to(to)
    }
    assert incoming == bindings
    for name in exchanges:
        assert set(here.route(here.get(name), [""], {})[0]) == routed(name, bindings)


def routed(name: str, bindings: set[Bound]) -> set[str]:
    """Return the queues that a message reaches through fanout exchanges."""
    seen = {name}
    todo = [name]
    queues = set()
    while todo:
        here = todo.pop()
        for each in bindings:
            if each.source != here:
                continue
            if each.destination.kind == QUEUE:
                queues.add(each.destination.name)
            elif each.destination.name not in seen:
                seen.add(each.destination.name)
                todo.append(each.destination.name)
    return queues


@pytest.mark.spec("E6")
@pytest.mark.promise("P2", "P10")
def test_topology_in_memory_and_on_disk_matches_the_model() -> None:
    run_state_machine_as_test(TopologyMachine, settings=settings(max_examples=200, stateful_step_count=20))
