"""The common part of both kinds of links: name, handle, and end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from basaltmq.protocols.amqp10.wire import performatives as p
from basaltmq.protocols.amqp10.wire.errors import STOLEN, LinkFault

if TYPE_CHECKING:
    from basaltmq.protocols.amqp10.session import Session


_log: Final = logging.getLogger(__name__)


class Link:
    """One link. The broker uses the client's handle."""

    __slots__ = ("attach", "handle", "is_ending", "is_stolen", "name", "role", "session", "vhost")

    def __init__(self, session: Session, attach: p.Attach) -> None:
        self.session = session
        self.vhost = session.vhost
        self.name = attach.name
        self.handle = attach.handle
        self.role = attach.role
        """The client's role."""
        self.attach: p.Attach | None = attach
        """The client's attach, until it is answered."""
        self.is_ending = False
        """We have sent detach, and wait for the client's."""
        self.is_stolen = False
        """The client has attached the link elsewhere."""

    def answer(self, *, source: Any, target: Any, **fields: Any) -> None:
        """Send our attach."""
        given = self.attach
        assert given is not None, "a link is attached once"
        self.attach = None
        self.session.send(
            p.Attach(
                name=self.name,
                handle=self.handle,
                role=not given.role,
                snd_settle_mode=given.snd_settle_mode if given.snd_settle_mode is not None else p.MIXED,
                rcv_settle_mode=given.rcv_settle_mode or p.FIRST,
                source=source,
                target=target,
                **fields,
            )
        )

    def refuse(self, fault: LinkFault) -> None:
        """Answer an attach with an error: attach without our terminus, then detach."""
        given = self.attach
        if given is not None:
            source, target = given.source, given.target
            if given.role == p.SENDER:
                self.answer(source=source, target=None)
            else:
                self.answer(source=None, target=target, initial_delivery_count=0)
        self.end(fault)

    def end(self, fault: LinkFault) -> None:
        """Detach the link because of a fault. The session continues."""
        if self.is_ending:
            return
        self.is_ending = True
        self.is_stolen = fault.condition == STOLEN
        _log.info("%s: link %.80r: %s", self.session.connection.name, self.name, fault)
        self.stop(is_closed=True)
        error = p.error_of(fault.condition, fault.text)
        self.session.send(p.Detach(handle=self.handle, closed=True, error=error))

    def detached(self, *, is_closed: bool) -> None:
        """The client has detached the link, or the session has ended."""
        if not self.is_ending:
            self.stop(is_closed=is_closed)
            if self.session.is_open:
                self.session.send(p.Detach(handle=self.handle, closed=is_closed or None))

    def stop(self, *, is_closed: bool) -> None:
        """Release what the link holds."""
        raise NotImplementedError
