"""What the outcomes of AMQP 1.0 mean for a message of a queue."""

from __future__ import annotations

from typing import Final

from basaltmq.broker.message.operations import ACK, REJECT, REQUEUE
from basaltmq.protocols.amqp10.wire import performatives as p

_OUTCOMES: Final[dict[type, str]] = {p.Accepted: ACK, p.Rejected: REJECT, p.Released: REQUEUE, p.Modified: REQUEUE}


def outcome_of(state: object) -> str | None:
    """Return what an outcome means for a message; None if the state is not an outcome."""
    if isinstance(state, p.Modified) and state.undeliverable_here:
        return REJECT
    return _OUTCOMES.get(type(state))
