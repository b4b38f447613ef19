"""Applies policies to the exchanges and queues of a virtual host, on declaration and on policy changes.

A change applies all policies to all objects, first exchanges, then queues. A later change replaces what is left of an
earlier one, so an import of many policies applies them to most objects once. A portion is one object: matching its name
usually takes 1 us per policy. A hostile pattern takes up to 10 ms.
"""

from __future__ import annotations

from basaltmq.broker.queue_table import QueueTable
from basaltmq.broker.routing.exchange import Exchange
from basaltmq.broker.routing.policy import Policies
from basaltmq.broker.routing.topology import Topology
from basaltmq.broker.scheduling.chores import Chore


class PolicyEffects:
    def __init__(self, policies: Policies, topology: Topology, queues: QueueTable) -> None:
        self._policies = policies
        self._topology = topology
        self._queues = queues
        self._version = 0

    def changed(self) -> Chore:
        """Return a chore that applies the current policies to all exchanges and queues, to one per call."""
        self._version += 1
        version = self._version
        exchanges = iter(list(self._topology.exchanges.values()))
        apply_to_queue = self._queues.policies_changed()

        def go_on() -> bool:
            if version != self._version:
                return False
            exchange = next(exchanges, None)
            if exchange is None:
                return apply_to_queue()
            if self._topology.exchanges.get(exchange.name) is exchange:
                self.apply(exchange)
            return True

        return go_on

    def apply(self, exchange: Exchange) -> None:
        """Apply the current policy to an exchange."""
        if exchange.name:
            policy = self._policies.of_exchange(exchange.name)
            exchange.policy = policy.name
            argument = exchange.arguments.get("alternate-exchange")
            alternate = policy.definition.get("alternate-exchange") if argument is None else argument
            if alternate != exchange.alternate:
                exchange.alternate = alternate
                self._topology.version += 1
