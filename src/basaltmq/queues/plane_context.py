"""What the queues of a plane have in common: the store, the givers of ids, places and tokens, timers, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from basaltmq.ids import Ids
from basaltmq.queues.boot import Places
from basaltmq.queues.change import Change
from basaltmq.queues.content import Content
from basaltmq.queues.events.recorder import Listener, Silence
from basaltmq.queues.leases.expiry import LeaseExpiry
from basaltmq.queues.leases.table import LeaseCall, Tokens
from basaltmq.queues.lifecycle.dead_letters import DeadLetterRouter
from basaltmq.queues.lifecycle.reclaim import Reclaim
from basaltmq.queues.lifecycle.timers import Timers
from basaltmq.queues.quarantine import Quarantine
from basaltmq.queues.ready.budget import MemoryBudget, PagingLimits
from basaltmq.queues.scripts.budget import ScriptBudget
from basaltmq.queues.throttle.token_buckets import TokenBuckets
from basaltmq.store.api import Store

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue


@dataclass(slots=True)
class Shared:
    """What the queues of a plane have in common."""

    store: Store
    ids: Ids
    content: Content
    tokens: Tokens
    places: Places
    quarantine: Quarantine
    reclaim: Reclaim
    lease_expiry: LeaseExpiry
    timers: Timers
    find: Callable[[Change, str], Queue]
    """The queue of this name, made in the change if it is missing: where dead letters go."""
    exists: Callable[[str], bool]
    """Whether there is a queue of this name."""
    check_limits: Callable[[str], None]
    """The queue of this name got messages that its limits were not asked about."""
    buckets: TokenBuckets = field(default_factory=TokenBuckets)
    throttles: set[str] = field(default_factory=set)
    """Throttle keys that have a limit."""
    parked: dict[str, None] = field(default_factory=dict)
    """Queues with messages that wait for tokens, of which those who listen are to be told."""
    holders: Callable[[str], Sequence[object]] = lambda name: ()
    """Prepared branches that have messages in the queue of this name, or for it."""
    is_orphan: Callable[[LeaseCall], bool] = lambda call: False
    """Whether a lease is held for a prepared branch that is not known."""
    route_dead: DeadLetterRouter | None = None
    """Where dead letters go, if the layer above has a say in it."""
    events: Listener = field(default_factory=Silence)
    """Who is told what happens to messages."""
    budget: MemoryBudget = field(default_factory=MemoryBudget)
    script_budget: ScriptBudget = field(default_factory=ScriptBudget)
    paging: PagingLimits = field(default_factory=PagingLimits)
