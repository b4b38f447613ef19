"""Applies policies to the exchanges and queues of a virtual host, on declaration and on policy changes.

A change applies all policies to all objects, first exchanges, then queues, in portions. A later change replaces the
remaining portions of an earlier one, so an import of many policies applies them to most objects once.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from basaltmq.broker.chores import Chore
from basaltmq.broker.queue_table import CONFIGURED_AT_ONCE, QueueTable
from basaltmq.broker.routing.exchange import Exchange
from basaltmq.broker.routing.policy import Policies
from basaltmq.broker.routing.topology import Topology

MATCHES_AT_ONCE: Final = 3000
"""Matches of a name with a pattern per portion, or those of one object."""


class PolicyEffects:
    def __init__(self, policies: Policies, topology: Topology, queues: QueueTable) -> None:
        self._policies = policies
        self._topology = topology
        self._queues = queues
        self._version = 0

    def changed(self) -> Chore:
        """Return a chore that applies the current policies to all exchanges and queues, a portion per call."""
        self._version += 1
        version = self._version
        exchanges = iter(list(self._topology.exchanges.values()))
        # A match of a pattern takes 1 us.
        most = max(1, min(CONFIGURED_AT_ONCE, MATCHES_AT_ONCE // max(1, self._policies.count())))
        apply_to_queues = self._queues.policies_changed(most)

        def go_on() -> bool:
            if version != self._version:
                return False
            portion = list(islice(exchanges, most))
            if not portion:
                return apply_to_queues()
            for exchange in portion:
                if self._topology.exchanges.get(exchange.name) is exchange:
                    self.apply(exchange)
            return len(portion) == most or apply_to_queues()

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
