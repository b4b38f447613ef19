"""RecallMessage: deletes a delayed message before it is due.

handle   base64url of | version u8 | due ms u64 | id (16) |
"""

from __future__ import annotations

import base64
import binascii
import struct
from struct import Struct
from typing import Final

from basaltmq.protocols.grpc.server.immediate_future import ImmediateFuture
from basaltmq.protocols.rocketmq.methods import Caller
from basaltmq.protocols.rocketmq.records import ID
from basaltmq.protocols.rocketmq.rules.names import topic_name
from basaltmq.protocols.rocketmq.rules.status import OK, Refused, status_of
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.scheduled import decode_scheduled
from basaltmq.wire import rocketmq_wire_pb2 as wire

VERSION: Final = 1
_LAYOUT: Final = Struct(">BQ16s")


def encode_recall(due_ms: int, record_id: bytes) -> str:
    """Return the handle with which a producer recalls a delayed message."""
    return base64.urlsafe_b64encode(_LAYOUT.pack(VERSION, due_ms, record_id)).decode()


def _key_of(handle: str) -> bytes:
    try:
        version, due_ms, record_id = _LAYOUT.unpack(base64.b64decode(handle, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, struct.error):
        version, due_ms, record_id = 0, 0, b""
    if version != VERSION:
        raise Refused(wire.BAD_REQUEST, "the recall handle is not one of this broker")
    return stream_keys.scheduled_key(stream_keys.SCHEDULED, due_ms, record_id)


def recall_message(request: wire.RecallMessageRequest, caller: Caller) -> ImmediateFuture[wire.RecallMessageResponse]:
    host = caller.host
    name = topic_name(request.topic)
    caller.check_write(name)
    key = _key_of(request.recall_handle)
    with host.guard():
        raw = None if host.schedule.is_moving(key) else host.vhost.store.get(Family.SCHEDULED_RECORDS, key)
        scheduled = None if raw is None else decode_scheduled(raw)
    if scheduled is None or scheduled.topic != name:
        raise Refused(wire.MESSAGE_NOT_FOUND, f"topic {name!r} has no such delayed message; it may have been delivered")
    message_id = next((value for header, value in scheduled.record.headers if header == ID), None) or b""
    batch = Batch()
    batch.delete(Family.SCHEDULED_RECORDS, key)
    answer: ImmediateFuture[wire.RecallMessageResponse] = ImmediateFuture()

    def synced(error: BaseException | None) -> None:
        status = OK if error is None else status_of(error)
        answer.set_result(wire.RecallMessageResponse(status=status, message_id=message_id.decode()))

    host.write_now(batch, synced)
    return answer
