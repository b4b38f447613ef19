"""Shared subscriptions: one queue per share name and topic filter, with the subscribed sessions as its consumers.

    $share/workers/jobs/#   ->   queue `mqtt.share.workers/jobs/#`, bound to the topic exchange with `jobs.#`

The queue exists as long as a session is a member. It delivers each message to one connected member. If that member
disconnects before it acknowledges, the message returns to its place, and another member gets it. Members of durable
sessions are rows, so the queue collects messages also while no member is connected.

A shared subscription has at most QoS 1: a QoS 2 message must not be sent to a second client, so it could not be
redelivered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Final

from basaltmq.broker.message.operations import Row
from basaltmq.broker.vhost import VHost
from basaltmq.protocols.mqtt.sessions import rows
from basaltmq.protocols.mqtt.wire import topics
from basaltmq.store.families import Family
from basaltmq.store.keys import mqtt as keys
from basaltmq.store.keys.parts import prefix_range

QUEUE_PREFIX: Final = "mqtt.share."
QOS_MAX: Final = 1
NAME_BYTES_MAX: Final = 200
"""Longer group names are shortened by a hash. The name of a queue has at most 255 bytes."""


class SharedSubscriptions:
    """The groups of shared subscriptions of a virtual host."""

    def __init__(self, vhost: VHost, exchange: str) -> None:
        self._vhost = vhost
        self._exchange = exchange
        self._members: dict[str, set[str]] = {}
        """Client ids by group: `name/filter`."""

    def load(self, has_session: Callable[[str], bool]) -> None:
        """Read the members. Remove those whose session ended when the broker stopped."""
        gone: list[Row] = []
        groups: set[str] = set()
        for key, _ in self._vhost.store.scan(Family.MQTT_SESSIONS, *prefix_range(keys.MEMBER)):
            group, client_id = keys.decode_member_key(key)
            groups.add(group)
            if has_session(client_id):
                self._members.setdefault(group, set()).add(client_id)
            else:
                gone.append(rows.delete(key))
        for group in groups - self._members.keys():
            self._vhost.delete_queue(queue_of(group))
        if gone:
            self._vhost.plane.write_rows(gone)

    def join(self, client_id: str, share: str, topic_filter: str) -> tuple[str, list[Row]]:
        """Add a member. Return the queue and the rows to write."""
        group = f"{share}/{topic_filter}"
        queue = queue_of(group)
        self._vhost.declare_queue(queue, durable=True)
        self._vhost.bind_queue(queue, self._exchange, topics.binding_key(topic_filter))
        self._members.setdefault(group, set()).add(client_id)
        return queue, [rows.mark(keys.member_key(group, client_id))]

    def leave(self, client_id: str, share: str, topic_filter: str) -> list[Row]:
        """Remove a member, and the queue if it was the last one. Return the rows to write."""
        group = f"{share}/{topic_filter}"
        members = self._members.get(group, set())
        members.discard(client_id)
        if not members:
            self._members.pop(group, None)
            self._vhost.delete_queue(queue_of(group))
        return [rows.delete(keys.member_key(group, client_id))]

    def leave_all(self, client_id: str, filters: Iterable[str]) -> None:
        """Remove a session from all its groups."""
        changes: list[Row] = []
        for each in filters:
            share, topic_filter = topics.split_share(each)
            if share is not None:
                changes += self.leave(client_id, share, topic_filter)
        if changes:
            self._vhost.plane.write_rows(changes)

    def members(self, share: str, topic_filter: str) -> int:
        return len(self._members.get(f"{share}/{topic_filter}", ()))


def queue_of(group: str) -> str:
    """Return the queue of a group: `name/filter`."""
    raw = group.encode()
    if len(raw) <= NAME_BYTES_MAX:
        return QUEUE_PREFIX + group
    digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
    return f"{QUEUE_PREFIX}{raw[: NAME_BYTES_MAX - 40].decode(errors='ignore')}~{digest}"
