"""Phases of connections and channels, and the methods valid in each.

    connection                                           channel
      HEADER          protocol header expected             OPEN      methods; basic.publish starts a content
      START_OK        mechanism and credentials expected   CONTENT   content header or body expected
      SECURE_OK       challenge response expected          CLOSING   close sent: ignores all but the response
      CHECKING        server checks the credentials        CLOSED    unknown channel number
      TUNE_OK         limits expected
      OPEN            virtual host expected
      OPENING         server opens the virtual host
      RUNNING         everything
      CLOSING         close sent: ignores all but close and close-ok
      CLOSED          nothing is read or sent

`ALLOWED` lists the connection methods of each phase. Other methods, contents and channels are valid in RUNNING only.
Anything else gets 503 (command invalid) during the handshake, and 504 (channel error) later. The socket is not read in
CHECKING and OPENING.
"""

from __future__ import annotations

import enum
from typing import Final

from basaltmq.protocols.amqp091.wire import methods as m


class Phase(enum.Enum):
    """Phase of a connection."""

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
"""Methods that a client may send on a channel. `basic.cancel-ok` responds to a server-sent basic.cancel."""


class ChannelPhase(enum.IntEnum):
    """Phase of a channel."""

    OPEN = 0
    CONTENT = 1
    CLOSING = 2
    CLOSED = 3


OPEN, CONTENT, CLOSING, CLOSED = ChannelPhase
