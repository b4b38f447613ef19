"""Messages held by a prepared XA branch (SPEC A6): a lease without expiry.

Preparing a branch moves the messages that it acks from the consumer's lease to a lease call of the branch. Its row
keeps the messages out of the queue after a restart. It has no row in the expiry index, and only the branch knows its
token. It ends with the branch: commit acks the messages, rollback returns them to their places.

    lease call row of a branch   as in table.py, expires ns = HELD, consumer = "xa " and the xid
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from basaltmq.errors import QueueHeldError
from basaltmq.queues.change import Change
from basaltmq.queues.leases.table import FOREVER, LeaseCall, encode_lease_call
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import lease_key

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

HELD: Final = FOREVER - 1
"""The expiry of a lease that ends with a branch. No clock reaches it, and opening the store does not end it."""


def is_held(call: LeaseCall) -> bool:
    return call.expires_ns == HELD


def require_free(queue: Queue) -> None:
    """Raise QueueHeldError if prepared branches hold messages of the queue."""
    holders = queue.shared.holders(queue.name)
    if holders:
        raise QueueHeldError(
            f"queue {queue.name!r} cannot be deleted: {len(holders)} prepared branches have messages in it or for it, "
            f"the first is {holders[0]}; commit or roll them back (basalt queue transactions)"
        )


def hold(queue: Queue, change: Change, token: int, ids: Sequence[bytes] | None, holder: str) -> LeaseCall:
    """Move messages of a lease (all by default) to a new lease call of the branch `holder`, and return that call."""
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
    change.batch.put(Family.LEASES, lease_key(queue.name, held.token), row)
    return held
