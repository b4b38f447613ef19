"""MQTT in one virtual host: sessions, wills, shared subscriptions, retained messages and rules.

    CONNECT ─> open ─> connected ─┬─> DISCONNECT, or the connection is lost ─┬─ expiry 0: end
                                  │                                          └─ otherwise: due row ─> expired: end
                                  └─> another connection with the same client id takes the session over

Connected sessions are in memory. All others are rows, so an idle session costs no memory here. Sessions that expire and
wills that are delayed have due rows; one timer covers the earliest. When the virtual host opens, connections that a
crash ended are handled as lost. All of this runs in portions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, Protocol

from basaltmq.broker.message.operations import Row, RowChange
from basaltmq.broker.routing.exchange import QUEUE
from basaltmq.broker.vhost import VHost
from basaltmq.errors import AccessRefusedError, BasaltError, StoreStalledError
from basaltmq.protocols.mqtt.sessions import rows
from basaltmq.protocols.mqtt.sessions.message import Decoded
from basaltmq.protocols.mqtt.sessions.retained import Retained
from basaltmq.protocols.mqtt.sessions.rows import EXPIRES, WILL_DUE, ConnectionRow, SessionRow, WillRow
from basaltmq.protocols.mqtt.sessions.rules import Rules
from basaltmq.protocols.mqtt.sessions.session import QUEUE_PREFIX, Session
from basaltmq.protocols.mqtt.sessions.shared_subscriptions import SharedSubscriptions
from basaltmq.protocols.mqtt.wire import topics
from basaltmq.store.families import Family
from basaltmq.store.keys import mqtt as keys
from basaltmq.store.keys.parts import prefix_range

NEVER_S: Final = 0xFFFF_FFFF
"""Session expiry of a session that does not expire."""

PORTION: Final = 10
"""Sessions ended or wills published per step: 2 to 5 ms."""

DUE_PAUSE_S: Final = 0.05
"""Delay before due work continues after a portion, or while the store is stalled."""

TIMER_S_MAX: Final = 3600.0
"""Longest sleep of the timer, because the system clock may be changed meanwhile."""

_S: Final = 1_000_000_000
_log: Final = logging.getLogger(__name__)


class Connected(Protocol):
    """The connection of a live session."""

    session: Session

    def taken_over(self) -> None:
        """End the connection, because another one takes the session over. Calls `MqttHost.close`."""
        ...


class MqttHost:
    """The MQTT state of one virtual host."""

    def __init__(
        self,
        vhost: VHost,
        exchange: str,
        *,
        offline_messages_max: int = 0,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`offline_messages_max` limits the queue of a durable session; 0: no limit."""
        self.vhost = vhost
        self.exchange = exchange
        self._offline_messages_max = offline_messages_max
        self.clock_ns = clock_ns
        self.decoded = Decoded()
        self.retained = Retained(vhost, clock_ns)
        self.shared_subscriptions = SharedSubscriptions(vhost, exchange)
        self.rules = Rules(vhost, exchange, self.decoded)
        self.live: dict[str, Connected] = {}
        """Connected clients by client id."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._is_closed = False

    def start(self) -> None:
        """Start the rules and the timer, and handle the connections that a crash ended."""
        self.shared_subscriptions.load(self._has_session)
        self.rules.load()
        lost = list(self._scan(keys.CONNECTION))
        if lost:
            _log.info(
                "vhost %r: closed %d MQTT connections that were open when the broker stopped",
                self.vhost.name,
                len(lost),
            )
        left = iter(lost)

        def end_lost() -> bool:
            portion = list(islice(left, PORTION))
            for key, raw in portion:
                self._lost(keys.decode_client_key(key), rows.decode(ConnectionRow, raw))
            return len(portion) == PORTION

        if end_lost():
            self.vhost.tick.add_chore(end_lost)
        self._arm()

    def close(self) -> None:
        self._is_closed = True
        self.rules.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _scan(self, kind: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self.vhost.store.scan(Family.MQTT_SESSIONS, *prefix_range(kind))

    def _has_session(self, client_id: str) -> bool:
        return rows.find(self.vhost.store, SessionRow, keys.client_key(keys.SESSION, client_id)) is not None

    def find(self, client_id: str) -> SessionRow | None:
        """Return the row of a durable session."""
        self.vhost.tick.flush()
        return rows.find(self.vhost.store, SessionRow, keys.client_key(keys.SESSION, client_id))

    def open(
        self, connected: Connected, client_id: str, user: str, *, clean_start: bool, expiry_s: int
    ) -> tuple[Session, bool]:
        """Open the session of a client that connects. Return it, and whether it existed before."""
        live = self.live.get(client_id)
        row = self.find(client_id)
        owner = live.session.user if live is not None else row.user if row is not None else user
        if owner != user:
            raise AccessRefusedError(
                f"the session of client id '{client_id}' belongs to another user; use another client id, or delete the "
                "session with `basalt mqtt disconnect --end-session`"
            )
        if live is not None:
            live.taken_over()
            row = self.find(client_id)
        if row is not None and clean_start:
            self.end(client_id)
            row = None
        if row is not None:
            session = Session.load(self.vhost.store, client_id, row)
            session.has_queue = session.queue in self.vhost.queues.by_name
            session.expiry_s = expiry_s
        else:
            session = Session(client_id, user, expiry_s, self.clock_ns() // 1_000_000)
        self.live[client_id] = connected
        return session, row is not None

    def opening_rows(self, session: Session, before: SessionRow | None, will: WillRow | None) -> list[Row]:
        """Return the rows of a session whose client has connected."""
        client_id = session.client_id
        changes = list(session.stale_rows)
        if before is not None and before.due_ns:
            changes.append(rows.delete(keys.due_key(before.due_ns, EXPIRES, client_id)))
        pending = rows.find(self.vhost.store, WillRow, keys.client_key(keys.WILL, client_id))
        if pending is not None:
            # The client has reconnected before the delay of its will was over.
            changes.append(rows.delete(keys.client_key(keys.WILL, client_id)))
            changes.append(rows.delete(keys.due_key(pending.due_ns, WILL_DUE, client_id)))
        session.has_rows = session.is_durable or before is not None
        if session.has_rows:
            # A session that ends with this connection keeps its rows until then, so that a crash leaves no other rows.
            changes.append(session.row())
        if session.is_durable or before is not None or will is not None:
            changes.append(rows.put(keys.client_key(keys.CONNECTION, client_id), ConnectionRow(session.expiry_s, will)))
        return changes

    def require_queue(self, session: Session) -> None:
        """Create the queue of a session, if it does not exist."""
        if session.has_queue:
            return
        durable = session.is_durable
        arguments = {"x-max-length": self._offline_messages_max} if durable and self._offline_messages_max else {}
        self.vhost.declare_queue(
            session.queue,
            durable=durable,
            exclusive=not durable,
            arguments=arguments,
            owner=None if durable else session,
        )
        session.has_queue = True

    def closed(self, connected: Connected, will: WillRow | None) -> None:
        """Handle the end of a connection. `will` is published now or after its delay."""
        session = connected.session
        client_id = session.client_id
        if self.live.get(client_id) is connected:
            del self.live[client_id]
        if not self.vhost.is_up:
            return
        self._ended(client_id, session.expiry_s, will, session)

    def _lost(self, client_id: str, row: ConnectionRow) -> None:
        """Handle a connection that a crash ended."""
        if client_id not in self.live:
            self._ended(client_id, row.expiry_s, row.will, None)

    def _ended(self, client_id: str, expiry_s: int, will: WillRow | None, session: Session | None) -> None:
        now_ns = self.clock_ns()
        changes = [rows.delete(keys.client_key(keys.CONNECTION, client_id))]
        if will is not None and will.delay_s and expiry_s:
            will.due_ns = now_ns + min(will.delay_s, expiry_s) * _S
            changes.append(rows.put(keys.client_key(keys.WILL, client_id), will))
            changes.append(rows.mark(keys.due_key(will.due_ns, WILL_DUE, client_id)))
            self._due_at(will.due_ns)
        elif will is not None:
            changes += self._publish_will(will)
        if expiry_s:
            found: Row | None = None
            due_ns = 0 if expiry_s == NEVER_S else now_ns + expiry_s * _S
            if session is not None:
                found = session.row(due_ns)
            else:
                row = rows.find(self.vhost.store, SessionRow, keys.client_key(keys.SESSION, client_id))
                if row is not None:
                    row.due_ns = due_ns
                    found = rows.put(keys.client_key(keys.SESSION, client_id), row)
            if found is not None:
                changes.append(found)
                if due_ns:
                    changes.append(rows.mark(keys.due_key(due_ns, EXPIRES, client_id)))
                    self._due_at(due_ns)
        self.vhost.write_rows(RowChange(changes))
        if session is not None:
            if not expiry_s:
                self.shared_subscriptions.leave_all(client_id, session.subscriptions)
            if session.has_queue or session.subscriptions:
                self.vhost.release_owner(session)
        if not expiry_s and (session is None or session.has_rows):
            self.end(client_id)

    def _publish_will(self, will: WillRow) -> list[Row]:
        """Publish a will. Return the row of its retained message."""
        key = topics.routing_key(will.topic)
        if self.exchange not in self.vhost.topology.exchanges:
            return []
        self.vhost.publish_many([(_Unconfirmed(), self.exchange, key, will.properties, will.payload, False, 0)])
        return [self.retained.row(will.topic, will.properties, will.payload)] if will.retain else []

    def end(self, client_id: str) -> None:
        """End a session that has no connection: delete its queue, its subscriptions and all its rows.

        A will that waits for its delay is published.
        """
        self.vhost.tick.flush()
        store = self.vhost.store
        row = rows.find(store, SessionRow, keys.client_key(keys.SESSION, client_id))
        will = rows.find(store, WillRow, keys.client_key(keys.WILL, client_id))
        changes: list[Row] = []
        if will is not None:
            changes += self._publish_will(will)
            changes.append(rows.delete(keys.due_key(will.due_ns, WILL_DUE, client_id)))
        if row is not None and row.due_ns:
            changes.append(rows.delete(keys.due_key(row.due_ns, EXPIRES, client_id)))
        start, end = prefix_range(keys.client_prefix(keys.SUBSCRIPTION, client_id))
        filters = [keys.decode_subscription_key(key)[1] for key, _ in store.scan(Family.MQTT_SESSIONS, start, end)]
        self.shared_subscriptions.leave_all(client_id, filters)
        changes += rows.all_of(store, client_id)
        queue = self.vhost.queues.by_name.get(QUEUE_PREFIX + client_id)
        if queue is not None and queue.owner is None:
            for _ in self.vhost.unbinding(QUEUE, queue.name):
                pass
            self.vhost.delete_queue(queue.name)
        self.vhost.write_rows(RowChange(changes))
        self.vhost.tick.flush()

    def _due_at(self, due_ns: int) -> None:
        if self._is_closed or (self._timer is not None and self._timer_ns <= due_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = due_ns
        delay_s = min(TIMER_S_MAX, max(0.0, (due_ns - self.clock_ns()) / _S))
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._run_due)

    def _arm(self) -> None:
        first = next(self._scan(keys.DUE), None)
        if first is not None:
            self._due_at(keys.decode_due_key(first[0])[0])

    def _run_due(self) -> None:
        """Do a portion of the due work."""
        self._timer = None
        if self._is_closed or not self.vhost.is_up:
            return
        try:
            self.vhost.tick.flush()
            now_ns = self.clock_ns()
            due = [keys.decode_due_key(key) for key, _ in islice(self._scan(keys.DUE), PORTION)]
            for due_ns, kind, client_id in due:
                if due_ns > now_ns:
                    break
                self._do_due(due_ns, kind, client_id)
            self.vhost.tick.flush()
        except StoreStalledError:
            self._due_at(self.clock_ns() + int(DUE_PAUSE_S * _S))
            return
        except BasaltError as error:
            _log.error("vhost %r: due MQTT sessions and wills: %s", self.vhost.name, error)
            return
        self._arm()

    def _do_due(self, due_ns: int, kind: bytes, client_id: str) -> None:
        store = self.vhost.store
        if kind == WILL_DUE:
            will = rows.find(store, WillRow, keys.client_key(keys.WILL, client_id))
            changes = [rows.delete(keys.due_key(due_ns, kind, client_id))]
            if will is not None and will.due_ns == due_ns:
                changes += self._publish_will(will)
                changes.append(rows.delete(keys.client_key(keys.WILL, client_id)))
            self.vhost.write_rows(RowChange(changes))
            return
        row = rows.find(store, SessionRow, keys.client_key(keys.SESSION, client_id))
        if row is not None and row.due_ns == due_ns and client_id not in self.live:
            self.end(client_id)
        else:
            self.vhost.write_rows(RowChange([rows.delete(keys.due_key(due_ns, kind, client_id))]))


class _Unconfirmed:
    """The publisher of a will, which has no connection."""

    __slots__ = ()

    def returned(self, exchange: str, routing_key: str, properties: bytes, body: bytes, number: int) -> None: ...

    def confirmed(self, numbers: Sequence[int], ok: bool) -> None: ...
