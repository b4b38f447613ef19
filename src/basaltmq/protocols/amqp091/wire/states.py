"""Phases of a connection and of a channel, and what may come in each.

    connection                                        channel
      HEADER          the eight bytes                   OPEN      methods; publish begins a content
      START_OK        mechanism and credentials         CONTENT   a content's header or body is due
      SECURE_OK       answer to a challenge             CLOSING   we said close: all but its answer is dropped
      CHECKING        we look at the credentials        CLOSED    unknown number
      TUNE_OK         limits
      OPEN            virtual host
      OPENING         we look for the virtual host
      RUNNING         everything
      CLOSING         we said close: all but close and close-ok is dropped
      CLOSED          nothing more is read or sent

The table gives the connection methods of each phase. Methods of other classes, contents and channels belong to
RUNNING. A client that sends anything else in the handshake is told 503 (command invalid), later 504 (channel error).
While CHECKING or OPENING the socket is not read.
"""

from __future__ import annotations

import enum
from typing import Final

from basaltmq.protocols.amqp091.wire import methods as m


class Phase(enum.Enum):
    """Where a connection is."""

    HEADER = "header"
    START_OK = "start-ok"
    SECURE_OK = "secure-ok"
    CHECKING = "checking"
    TUNE_OK = "tune-ok"
    OPEN = "open"
    OPENING = "opening"
    RUNNING = "running"
    CLOSING = "closing"
    CLOSED = "closed"


ALLOWED: Final[dict[Phase, frozenset[type[m.Method]]]] = {
    Phase.HEADER: frozenset(),
    Phase.START_OK: frozenset({m.ConnectionStartOk, m.ConnectionClose}),
    Phase.SECURE_OK: frozenset({m.ConnectionSecureOk, m.ConnectionClose}),
    Phase.CHECKING: frozenset({m.ConnectionClose}),
    Phase.TUNE_OK: frozenset({m.ConnectionTuneOk, m.ConnectionClose}),
    Phase.OPEN: frozenset({m.ConnectionOpen, m.ConnectionClose}),
    Phase.OPENING: frozenset({m.ConnectionClose}),
    Phase.RUNNING: frozenset({m.ConnectionClose, m.ConnectionUpdateSecret}),
    Phase.CLOSING: frozenset({m.ConnectionClose, m.ConnectionCloseOk}),
    Phase.CLOSED: frozenset(),
}

FROM_CLIENTS: Final[frozenset[type[m.Method]]] = frozenset(
    {
        m.ChannelOpen,
        m.ChannelFlow,
        m.ChannelFlowOk,
        m.ChannelClose,
        m.ChannelCloseOk,
        m.AccessRequest,
        m.ExchangeDeclare,
        m.ExchangeDelete,
        m.ExchangeBind,
        m.ExchangeUnbind,
        m.QueueDeclare,
        m.QueueBind,
        m.QueuePurge,
        m.QueueDelete,
        m.QueueUnbind,
        m.BasicQos,
        m.BasicConsume,
        m.BasicCancel,
        m.BasicCancelOk,
        m.BasicPublish,
        m.BasicGet,
        m.BasicAck,
        m.BasicReject,
        m.BasicRecoverAsync,
        m.BasicRecover,
        m.BasicNack,
        m.ConfirmSelect,
        m.TxSelect,
        m.TxCommit,
        m.TxRollback,
    }
)
"""Methods a client may send on a channel. `basic.cancel-ok` answers our notice of a lost consumer."""


class ChannelPhase(enum.IntEnum):
    """Where a channel is."""

    OPEN = 0
    CONTENT = 1
    CLOSING = 2
    CLOSED = 3


OPEN, CONTENT, CLOSING, CLOSED = ChannelPhase
