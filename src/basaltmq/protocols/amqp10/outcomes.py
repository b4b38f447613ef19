"""What the outcomes of AMQP 1.0 mean for a message of a queue.

    accepted                            acknowledged
    rejected                            dead-lettered
    released                            back to its place; no attempt counts
    modified                            back to its place; an attempt counts if the delivery has failed
    modified, undeliverable here        dead-lettered

The annotations of `modified` are merged into those of the message.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Final, NamedTuple

from basaltmq.broker.message.operations import ACK, FAIL, REJECT, REQUEUE
from basaltmq.errors import BasaltError
from basaltmq.protocols.amqp10.message import with_annotations
from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire.errors import Fault
from basaltmq.queues.lifecycle.failures import Edit

_OUTCOMES: Final[dict[type, str]] = {p.Accepted: ACK, p.Rejected: REJECT, p.Released: REQUEUE}
_log: Final = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """The outcome of a delivery."""

    kind: str
    edit: Edit | None = None


ACCEPTED: Final = Outcome(ACK)
RELEASED: Final = Outcome(REQUEUE)


def outcome_of(state: object) -> Outcome | None:
    """Return what an outcome means for a message; None if the state is not an outcome."""
    if isinstance(state, p.Modified):
        kind = REJECT if state.undeliverable_here else FAIL if state.delivery_failed else REQUEUE
        given = state.message_annotations
        return Outcome(kind, partial(_annotated, given) if given else None)
    found = _OUTCOMES.get(type(state))
    return None if found is None else Outcome(found)


def _annotated(given: dict[Any, Any], envelope: bytes) -> bytes:
    try:
        return with_annotations(envelope, given)
    except (BasaltError, Fault) as error:
        _log.warning("annotations of a modified message are ignored: %s", error)
        return envelope
