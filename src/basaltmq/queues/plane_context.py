"""The context that the queues of a plane share: store, generators of ids, enqueue times and tokens, timers, memory
budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from basaltmq.ids import Ids
from basaltmq.queues.boot import EnqueueClock
from basaltmq.queues.change import Change
from basaltmq.queues.content import Content
from basaltmq.queues.entries.quarantine import Quarantine
from basaltmq.queues.events.recorder import Listener, NoListener
from basaltmq.queues.leases.expiry import LeaseExpiry
from basaltmq.queues.leases.table import LeaseCall, Tokens
from basaltmq.queues.lifecycle.dead_letters import DeadLetterRouter
from basaltmq.queues.lifecycle.reclaim import Reclaim
from basaltmq.queues.lifecycle.timers import Timers
from basaltmq.queues.ready.budget import MemoryBudget, PagingLimits
from basaltmq.queues.scripts.budget import ScriptBudget
from basaltmq.queues.throttle.token_buckets import TokenBuckets
from basaltmq.store.api import Store

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue


@dataclass(slots=True)
class PlaneContext:
    """State and services that all queues of a plane share."""

    store: Store
    ids: Ids
    content: Content
    tokens: Tokens
    enqueue_clock: EnqueueClock
    quarantine: Quarantine
    reclaim: Reclaim
    lease_expiry: LeaseExpiry
    timers: Timers
    find: Callable[[Change, str], Queue]
    """Return the queue with this name, created in the change if missing. Used for dead letters."""
    exists: Callable[[str], bool]
    """Whether a queue with this name exists."""
    check_limits: Callable[[str], None]
    """Schedule a limit check of a queue that received messages without one."""
    buckets: TokenBuckets = field(default_factory=TokenBuckets)
    throttles: set[str] = field(default_factory=set)
    """Throttle keys with a limit."""
    parked: dict[str, None] = field(default_factory=dict)
    """Queues with parked messages, whose listeners must be notified when tokens arrive."""
    holders: Callable[[str], Sequence[object]] = lambda name: ()
    """Return the prepared branches with messages in, or for, the queue with this name."""
    is_orphan: Callable[[LeaseCall], bool] = lambda call: False
    """Whether a lease belongs to an unknown prepared branch."""
    route_dead: DeadLetterRouter | None = None
    """Chooses the targets of dead letters if the layer above routes them."""
    events: Listener = field(default_factory=NoListener)
    """Receives message events."""
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    script_budget: ScriptBudget = field(default_factory=ScriptBudget)
    paging: PagingLimits = field(default_factory=PagingLimits)
