"""AckMessage, ChangeInvisibleDuration, ForwardMessageToDeadLetterQueue: what consumers do with messages under a lease.

A call is answered after the sync of its change. A handle with an old token is refused: the lease has expired, or the
message was delivered again.
"""

from __future__ import annotations

from typing import Final

from basaltmq.errors import NotFoundError
from basaltmq.protocols.grpc.server.immediate_future import ImmediateFuture
from basaltmq.protocols.rocketmq.consumption import Consumption
from basaltmq.protocols.rocketmq.methods import Caller
from basaltmq.protocols.rocketmq.receiving import INVISIBLE_MS_MAX
from basaltmq.protocols.rocketmq.rules.handles import decode_handle, encode_handle
from basaltmq.protocols.rocketmq.rules.messages import millis
from basaltmq.protocols.rocketmq.rules.names import group_name, topic_name
from basaltmq.protocols.rocketmq.rules.status import OK, Refused, status_of
from basaltmq.streams.pop.lease import Lease
from basaltmq.wire import rocketmq_wire_pb2 as wire

ENTRIES_MAX: Final = 1_024
"""Messages that one call acknowledges."""


def ack_message(
    request: wire.AckMessageRequest, caller: Caller
) -> ImmediateFuture[wire.AckMessageResponse] | wire.AckMessageResponse:
    consumptions = {"": _consumption(request.group, request.topic, "", caller)}
    if not 0 < len(request.entries) <= ENTRIES_MAX:
        raise Refused(wire.BAD_REQUEST, f"a call acknowledges 1 to {ENTRIES_MAX} messages, not {len(request.entries)}")
    response = wire.AckMessageResponse()
    accepted: list[wire.AckMessageResultEntry] = []
    for entry in request.entries:
        result = response.entries.add(message_id=entry.message_id, receipt_handle=entry.receipt_handle, status=OK)
        try:
            consumption = consumptions.get(entry.lite_topic)
            if consumption is None:
                consumption = _consumption(request.group, request.topic, entry.lite_topic, caller)
                consumptions[entry.lite_topic] = consumption
            lease = held(entry.receipt_handle, consumption, caller)
        except (Refused, NotFoundError) as refused:
            result.status.CopyFrom(status_of(refused))
        else:
            consumption.subscription.settle(lease, caller.host.now_ms())
            consumption.changed()
            accepted.append(result)
    answer: ImmediateFuture[wire.AckMessageResponse] = ImmediateFuture()

    def synced(error: BaseException | None) -> None:
        if error is not None:
            for result in accepted:
                result.status.CopyFrom(status_of(error))
        codes = {each.status.code for each in response.entries}
        if len(codes) == 1:
            response.status.CopyFrom(response.entries[0].status)
        else:
            response.status.code = wire.MULTIPLE_RESULTS
            response.status.message = "the messages have different results"
        answer.set_result(response)

    if accepted:
        caller.host.write_soon(synced)
    else:
        synced(None)
    return answer


def change_invisible_duration(
    request: wire.ChangeInvisibleDurationRequest, caller: Caller
) -> ImmediateFuture[wire.ChangeInvisibleDurationResponse]:
    consumption = _consumption(request.group, request.topic, request.lite_topic, caller)
    invisible_ms = millis(request.invisible_duration)
    if not 0 <= invisible_ms <= INVISIBLE_MS_MAX:
        raise Refused(
            wire.ILLEGAL_INVISIBLE_TIME,
            f"the invisible duration must be 0 to {INVISIBLE_MS_MAX} ms, not {invisible_ms}",
        )
    lease = held(request.receipt_handle, consumption, caller)
    consumption.subscription.extend(lease, caller.host.now_ms() + invisible_ms)
    response = wire.ChangeInvisibleDurationResponse(
        status=OK, receipt_handle=encode_handle(consumption.group, consumption.topic.id, lease)
    )
    answer: ImmediateFuture[wire.ChangeInvisibleDurationResponse] = ImmediateFuture()

    def synced(error: BaseException | None) -> None:
        if error is not None:
            response.status.CopyFrom(status_of(error))
        answer.set_result(response)

    consumption.changed(synced)
    return answer


def forward_to_dead_letters(
    request: wire.ForwardMessageToDeadLetterQueueRequest, caller: Caller
) -> ImmediateFuture[wire.ForwardMessageToDeadLetterQueueResponse]:
    consumption = _consumption(request.group, request.topic, request.lite_topic, caller)
    lease = held(request.receipt_handle, consumption, caller)
    with caller.host.guard():
        read = consumption.record_at(lease)
    if read is None:
        raise Refused(wire.MESSAGE_NOT_FOUND, "the message no longer exists")
    consumption.dead_letter(lease, *read, caller.host.now_ms())
    answer: ImmediateFuture[wire.ForwardMessageToDeadLetterQueueResponse] = ImmediateFuture()

    def synced(error: BaseException | None) -> None:
        status = OK if error is None else status_of(error)
        answer.set_result(wire.ForwardMessageToDeadLetterQueueResponse(status=status))

    consumption.changed(synced)
    return answer


def held(handle: str, consumption: Consumption, caller: Caller) -> Lease:
    """Return the lease of a receipt handle, or raise INVALID_RECEIPT_HANDLE."""
    place = decode_handle(handle, consumption.group, consumption.topic.id)
    host = caller.host
    state = consumption.subscription
    lease = state.held(place.partition, place.offset, place.token, host.now_ms())
    if lease is None:
        consumption.extend_alive(host.now_ms())
        lease = state.held(place.partition, place.offset, place.token, host.now_ms())
    if lease is None:
        raise Refused(
            wire.INVALID_RECEIPT_HANDLE,
            "the receipt handle is no longer valid: its invisible duration is over, or the message was delivered again",
        )
    return lease


def _consumption(group: wire.Resource, topic: wire.Resource, lite: str, caller: Caller) -> Consumption:
    """Return the consumption of a topic or of one of its lite topics."""
    name, group_text = topic_name(topic), group_name(group)
    caller.check_read(name)
    caller.check_read(group_text)
    host = caller.host
    found = host.topic(name)
    if lite:
        return host.consumption(group_text, host.lites.require(found, lite))
    return host.consumption(group_text, found)
