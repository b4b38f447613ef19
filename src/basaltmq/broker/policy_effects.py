"""Applies policies to the exchanges and queues of a virtual host, on declaration and on policy changes."""

from __future__ import annotations

from basaltmq.broker.chores import Chore
from basaltmq.broker.queue_table import QueueTable
from basaltmq.broker.routing.exchange import Exchange
from basaltmq.broker.routing.policy import Policies
from basaltmq.broker.routing.topology import Topology


class PolicyEffects:
    def __init__(self, policies: Policies, topology: Topology, queues: QueueTable) -> None:
        self._policies = policies
        self._topology = topology
        self._queues = queues

    def changed(self) -> Chore:
        """Apply changed policies to all exchanges now. Return a chore that applies them to all queues."""
        for exchange in list(self._topology.exchanges.values()):
            self.apply(exchange)
        return self._queues.policies_changed()

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
