"""Messages that a prepared branch holds (SPEC A6): a lease that no time ends.

When a branch is prepared, what it acks leaves its consumer's lease and comes under a lease call of the branch. That
call is a row like any other, so its messages are out of the queue after a restart too; but it stands in no expiry
index, and nobody knows its token but the branch. It ends with the branch: commit acks it, rollback gives its messages
back to their places.

    lease call row of a branch   as in leases.py, expires ns = HELD, consumer = "xa " and the xid
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from basaltmq.errors import QueueHeldError
from basaltmq.queues.change import Change
from basaltmq.queues.leases.table import FOREVER, LeaseCall, encode_lease_call
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import lease_call_key

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

HELD: Final = FOREVER - 1
"""The expiry of a lease that ends with a branch. No clock reaches it, and opening does not end it."""


def is_held(call: LeaseCall) -> bool:
    return call.expires_ns == HELD


def require_free(queue: Queue) -> None:
    """Refuse to delete a queue whose messages a prepared branch was promised."""
    holders = queue.shared.holders(queue.name)
    if holders:
        raise QueueHeldError(
            f"queue {queue.name!r} cannot be deleted: {len(holders)} prepared branches wait for their outcome, "
            f"the first is {holders[0]}; commit or roll them back (basalt queue transactions)"
        )


def hold(queue: Queue, change: Change, token: int, ids: Sequence[bytes] | None, holder: str) -> LeaseCall:
    """Messages of a lease (all by default) are held from here on; the call they are under."""
    leases = queue.leases
    rest, taken = leases.take(token, ids)
    change.undo(lambda: leases.restore(rest, taken))
    if not rest.entries:
        change.after(lambda: queue.shared.lease_expiry.remove(token))
    leases.settled(change.batch, rest, rewrite=True)
    held = LeaseCall(queue.shared.tokens.next(), holder, change.now_ns, HELD, taken)
    leases.restore(held, taken)
    change.undo(lambda: leases.forget(held))
    row = encode_lease_call(held, queue.prefix_bytes)
    change.batch.put(Family.LEASE_CALLS, lease_call_key(queue.name, held.token), row)
    return held
