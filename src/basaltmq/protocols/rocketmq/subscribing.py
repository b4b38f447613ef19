"""SyncLiteSubscription: the lite topics that a client wants to receive."""

from __future__ import annotations

from typing import Final

from basaltmq.log.batches.record import TIMESTAMP_MS_MAX
from basaltmq.protocols.rocketmq.lite.subscriptions import LiteSubscription
from basaltmq.protocols.rocketmq.methods import Caller
from basaltmq.protocols.rocketmq.routes import accepted_types
from basaltmq.protocols.rocketmq.rules.names import check_lite_name, group_name, topic_name
from basaltmq.protocols.rocketmq.rules.status import OK, Refused
from basaltmq.store.batch import Batch
from basaltmq.streams.adapter import IfAllOlder
from basaltmq.streams.offsets import Commit, put_commit
from basaltmq.streams.pop.groups import GroupConfig
from basaltmq.streams.shards import OFFSET_MAX
from basaltmq.streams.topics import Topic
from basaltmq.wire import rocketmq_wire_pb2 as wire

LITE_CLIENTS: Final = frozenset({wire.LITE_PUSH_CONSUMER, wire.LITE_SIMPLE_CONSUMER})


async def sync_lite_subscription(
    request: wire.SyncLiteSubscriptionRequest, caller: Caller
) -> wire.SyncLiteSubscriptionResponse:
    host = caller.host
    name, group = topic_name(request.topic), group_name(request.group)
    caller.check_read(name)
    caller.check_read(group)
    parent = host.topic(name)
    if wire.LITE not in accepted_types(parent):
        raise Refused(wire.ILLEGAL_LITE_TOPIC, f"topic {name!r} is not one of type LITE")
    for each in request.lite_topic_set:
        check_lite_name(each)
    await host.group_or_new(group, GroupConfig(), lambda: caller.may_configure(group))
    mine = host.lite_subscriptions.find(caller.client.id, group, parent)
    given = set(request.lite_topic_set)
    if request.action in (wire.PARTIAL_REMOVE, wire.COMPLETE_REMOVE):
        for each in given if request.action == wire.PARTIAL_REMOVE else mine.names:
            mine.remove(each)
    else:
        await _add(request, caller, group, mine, given)
    return wire.SyncLiteSubscriptionResponse(status=OK)


async def _add(
    request: wire.SyncLiteSubscriptionRequest, caller: Caller, group: str, mine: LiteSubscription, given: set[str]
) -> None:
    host = caller.host
    host.lite_subscriptions.check_quota(mine, len(given | mine.names if request.action == wire.PARTIAL_ADD else given))
    topics = dict(zip(given, await host.lites.get(mine.parent, list(given)), strict=True))
    if request.HasField("offset_option"):
        for topic in topics.values():
            _reset(request.offset_option, caller, group, topic)
    if request.action == wire.COMPLETE_ADD:
        for each in mine.names - given:
            mine.remove(each)
    # A name that is known is added again, because its topic may be a new one.
    for each, topic in topics.items():
        mine.add(each, topic)


def _reset(option: wire.OffsetOption, caller: Caller, group: str, topic: Topic) -> None:
    """Move the cursor of a group to the start that a client requests."""
    host = caller.host
    kind = option.WhichOneof("offset_type")
    if kind is None or (kind == "policy" and option.policy == wire.OffsetOption.LAST):
        return
    with host.guard():
        info = host.plane.drivers.info(topic.name, 0)
        if kind == "policy":
            offset = info.start_offset if option.policy == wire.OffsetOption.MIN else info.high_watermark
        elif kind == "offset":
            offset = min(max(0, option.offset), OFFSET_MAX)
        elif kind == "tail_n":
            offset = max(info.start_offset, info.high_watermark - max(0, option.tail_n))
        else:
            at_ms = min(max(0, option.timestamp), TIMESTAMP_MS_MAX)
            offset = host.plane.drivers.offset_at(topic.name, 0, at_ms, IfAllOlder.LATEST)
        batch = Batch()
        put_commit(batch, group, topic.id, 0, Commit(offset, host.now_ms()))
        host.vhost.store.write(batch, wait_ms=0)
