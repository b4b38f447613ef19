"""The settings of a queue on the wire, as the queue plane has them."""

from __future__ import annotations

import msgspec

from basaltmq.errors import InvalidConfigError
from basaltmq.queues.config import QueueConfig, queue_config
from basaltmq.wire import basalt_pb2 as wire


def config_of(name: str, asked: wire.QueueConfig) -> QueueConfig:
    """The configuration of a queue to make; what is absent has its default."""
    given = {field.name: value for field, value in asked.ListFields()}
    try:
        return queue_config(given | {"name": name})
    except msgspec.ValidationError as error:
        raise InvalidConfigError(f"queue {name!r}: {error}") from error
