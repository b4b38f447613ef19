"""Table of all methods of AMQP 0-9-1 and RabbitMQ's extensions.

Each method is a class with its number and its arguments in wire order. The type name of an argument is its wire type
(`ShortStr`, `Bit`, ...). method_codec.py derives the codecs from this table. Only the hot paths (publish, deliver, ack,
confirm) encode or decode arguments by hand.
"""

from __future__ import annotations

from typing import ClassVar, Final, TypeAlias

import msgspec

from basaltmq.broker.message import amqp_table

Bit: TypeAlias = bool
Octet: TypeAlias = int
Short: TypeAlias = int
Long: TypeAlias = int
LongLong: TypeAlias = int
ShortStr: TypeAlias = str
LongStr: TypeAlias = bytes
Table: TypeAlias = amqp_table.Table


class Method(msgspec.Struct):
    """A method and its arguments. Subclasses set `number`: (class id, method id)."""

    number: ClassVar[tuple[int, int]] = (0, 0)


class ConnectionStart(Method):
    number = (10, 10)
    version_major: Octet
    version_minor: Octet
    server_properties: Table
    mechanisms: LongStr
    locales: LongStr


class ConnectionStartOk(Method):
    number = (10, 11)
    client_properties: Table
    mechanism: ShortStr
    response: LongStr
    locale: ShortStr


class ConnectionSecure(Method):
    number = (10, 20)
    challenge: LongStr


class ConnectionSecureOk(Method):
    number = (10, 21)
    response: LongStr


class ConnectionTune(Method):
    number = (10, 30)
    channel_max: Short
    frame_max: Long
    heartbeat: Short


class ConnectionTuneOk(Method):
    number = (10, 31)
    channel_max: Short
    frame_max: Long
    heartbeat: Short


class ConnectionOpen(Method):
    number = (10, 40)
    virtual_host: ShortStr
    capabilities: ShortStr = ""
    insist: Bit = False


class ConnectionOpenOk(Method):
    number = (10, 41)
    known_hosts: ShortStr = ""


class ConnectionClose(Method):
    number = (10, 50)
    reply_code: Short
    reply_text: ShortStr
    class_id: Short
    method_id: Short


class ConnectionCloseOk(Method):
    number = (10, 51)


class ConnectionBlocked(Method):
    number = (10, 60)
    reason: ShortStr


class ConnectionUnblocked(Method):
    number = (10, 61)


class ConnectionUpdateSecret(Method):
    number = (10, 70)
    secret: LongStr
    reason: ShortStr


class ConnectionUpdateSecretOk(Method):
    number = (10, 71)


class ChannelOpen(Method):
    number = (20, 10)
    out_of_band: ShortStr = ""


class ChannelOpenOk(Method):
    number = (20, 11)
    channel_id: LongStr = b""


class ChannelFlow(Method):
    number = (20, 20)
    active: Bit


class ChannelFlowOk(Method):
    number = (20, 21)
    active: Bit


class ChannelClose(Method):
    number = (20, 40)
    reply_code: Short
    reply_text: ShortStr
    class_id: Short
    method_id: Short


class ChannelCloseOk(Method):
    number = (20, 41)


class AccessRequest(Method):
    number = (30, 10)
    realm: ShortStr
    exclusive: Bit
    passive: Bit
    active: Bit
    write: Bit
    read: Bit


class AccessRequestOk(Method):
    number = (30, 11)
    ticket: Short


class ExchangeDeclare(Method):
    number = (40, 10)
    ticket: Short
    exchange: ShortStr
    type: ShortStr
    passive: Bit
    durable: Bit
    auto_delete: Bit
    internal: Bit
    nowait: Bit
    arguments: Table


class ExchangeDeclareOk(Method):
    number = (40, 11)


class ExchangeDelete(Method):
    number = (40, 20)
    ticket: Short
    exchange: ShortStr
    if_unused: Bit
    nowait: Bit


class ExchangeDeleteOk(Method):
    number = (40, 21)


class ExchangeBind(Method):
    number = (40, 30)
    ticket: Short
    destination: ShortStr
    source: ShortStr
    routing_key: ShortStr
    nowait: Bit
    arguments: Table


class ExchangeBindOk(Method):
    number = (40, 31)


class ExchangeUnbind(Method):
    number = (40, 40)
    ticket: Short
    destination: ShortStr
    source: ShortStr
    routing_key: ShortStr
    nowait: Bit
    arguments: Table


class ExchangeUnbindOk(Method):
    number = (40, 51)


class QueueDeclare(Method):
    number = (50, 10)
    ticket: Short
    queue: ShortStr
    passive: Bit
    durable: Bit
    exclusive: Bit
    auto_delete: Bit
    nowait: Bit
    arguments: Table


class QueueDeclareOk(Method):
    number = (50, 11)
    queue: ShortStr
    message_count: Long
    consumer_count: Long


class QueueBind(Method):
    number = (50, 20)
    ticket: Short
    queue: ShortStr
    exchange: ShortStr
    routing_key: ShortStr
    nowait: Bit
    arguments: Table


class QueueBindOk(Method):
    number = (50, 21)


class QueuePurge(Method):
    number = (50, 30)
    ticket: Short
    queue: ShortStr
    nowait: Bit


class QueuePurgeOk(Method):
    number = (50, 31)
    message_count: Long


class QueueDelete(Method):
    number = (50, 40)
    ticket: Short
    queue: ShortStr
    if_unused: Bit
    if_empty: Bit
    nowait: Bit


class QueueDeleteOk(Method):
    number = (50, 41)
    message_count: Long


class QueueUnbind(Method):
    number = (50, 50)
    ticket: Short
    queue: ShortStr
    exchange: ShortStr
    routing_key: ShortStr
    arguments: Table


class QueueUnbindOk(Method):
    number = (50, 51)


class BasicQos(Method):
    number = (60, 10)
    prefetch_size: Long
    prefetch_count: Short
    global_: Bit


class BasicQosOk(Method):
    number = (60, 11)


class BasicConsume(Method):
    number = (60, 20)
    ticket: Short
    queue: ShortStr
    consumer_tag: ShortStr
    no_local: Bit
    no_ack: Bit
    exclusive: Bit
    nowait: Bit
    arguments: Table


class BasicConsumeOk(Method):
    number = (60, 21)
    consumer_tag: ShortStr


class BasicCancel(Method):
    number = (60, 30)
    consumer_tag: ShortStr
    nowait: Bit


class BasicCancelOk(Method):
    number = (60, 31)
    consumer_tag: ShortStr


class BasicPublish(Method):
    number = (60, 40)
    ticket: Short
    exchange: ShortStr
    routing_key: ShortStr
    mandatory: Bit
    immediate: Bit


class BasicReturn(Method):
    number = (60, 50)
    reply_code: Short
    reply_text: ShortStr
    exchange: ShortStr
    routing_key: ShortStr


class BasicDeliver(Method):
    number = (60, 60)
    consumer_tag: ShortStr
    delivery_tag: LongLong
    redelivered: Bit
    exchange: ShortStr
    routing_key: ShortStr


class BasicGet(Method):
    number = (60, 70)
    ticket: Short
    queue: ShortStr
    no_ack: Bit


class BasicGetOk(Method):
    number = (60, 71)
    delivery_tag: LongLong
    redelivered: Bit
    exchange: ShortStr
    routing_key: ShortStr
    message_count: Long


class BasicGetEmpty(Method):
    number = (60, 72)
    cluster_id: ShortStr = ""


class BasicAck(Method):
    number = (60, 80)
    delivery_tag: LongLong
    multiple: Bit


class BasicReject(Method):
    number = (60, 90)
    delivery_tag: LongLong
    requeue: Bit


class BasicRecoverAsync(Method):
    number = (60, 100)
    requeue: Bit


class BasicRecover(Method):
    number = (60, 110)
    requeue: Bit


class BasicRecoverOk(Method):
    number = (60, 111)


class BasicNack(Method):
    number = (60, 120)
    delivery_tag: LongLong
    multiple: Bit
    requeue: Bit


class ConfirmSelect(Method):
    number = (85, 10)
    nowait: Bit


class ConfirmSelectOk(Method):
    number = (85, 11)


class TxSelect(Method):
    number = (90, 10)


class TxSelectOk(Method):
    number = (90, 11)


class TxCommit(Method):
    number = (90, 20)


class TxCommitOk(Method):
    number = (90, 21)


class TxRollback(Method):
    number = (90, 30)


class TxRollbackOk(Method):
    number = (90, 31)


ALL: Final[tuple[type[Method], ...]] = tuple(Method.__subclasses__())
