"""Conversion of a queue configuration on the wire to `QueueConfig`."""

from __future__ import annotations

import msgspec

from basaltmq.errors import InvalidConfigError
from basaltmq.queues.config import QueueConfig, queue_config
from basaltmq.wire import basalt_pb2 as wire


def config_of(name: str, asked: wire.QueueConfig) -> QueueConfig:
    """Return the configuration for a new queue. Absent fields get their defaults."""
    given = {field.name: value for field, value in asked.ListFields()}
    try:
        return queue_config(given | {"name": name})
    except msgspec.ValidationError as error:
        raise InvalidConfigError(f"queue {name!r}: {error}") from error
