"""Calls of the RocketMQ protocol over grpcio, message by message, as clients in tests."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import queue
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import grpc

from basaltmq.wire import rocketmq_wire_pb2 as wire

SERVICE = "/apache.rocketmq.v2.MessagingService/"
WAIT_S = 30.0
_numbers = itertools.count()


class Telemetry:
    """A telemetry stream: what is sent, and what the broker sends."""

    def __init__(self, client: Client) -> None:
        self._out: queue.Queue[wire.TelemetryCommand | None] = queue.Queue()
        self.received: queue.Queue[wire.TelemetryCommand] = queue.Queue()
        call: Any = client.channel.stream_stream(
            SERVICE + "Telemetry",
            request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=wire.TelemetryCommand.FromString,
        )
        self._call = call(iter(self._out.get, None), metadata=client.metadata())
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for each in self._call:
                self.received.put(each)

    def send(self, command: wire.TelemetryCommand) -> wire.TelemetryCommand:
        """Send a command and return the next one from the broker."""
        self._out.put(command)
        return self.received.get(timeout=WAIT_S)

    def close(self) -> None:
        self._call.cancel()
        self._out.put(None)
        self._reader.join(WAIT_S)


class Client:
    """A client with an id of its own."""

    def __init__(
        self, port: int, *, client_id: str | None = None, key: str = "", secret: str = "", tls: bytes | None = None
    ) -> None:
        address = f"127.0.0.1:{port}"
        if tls is None:
            self.channel = grpc.insecure_channel(address)
        else:
            options = [("grpc.ssl_target_name_override", "localhost")]
            self.channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(tls), options)
        self.port = port
        self.client_id = f"test-{next(_numbers)}" if client_id is None else client_id
        self._key = key
        self._secret = secret

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def metadata(self) -> list[tuple[str, str]]:
        when = "20260101T000000Z"
        found = [("x-mq-date-time", when)]
        if self.client_id:
            found.append(("x-mq-client-id", self.client_id))
        if self._key:
            signature = hmac.new(self._secret.encode(), when.encode(), hashlib.sha1).hexdigest().upper()
            parts = f"Credential={self._key}, SignedHeaders=x-mq-date-time, Signature={signature}"
            found.append(("authorization", f"MQv2-HMAC-SHA1 {parts}"))
        return found

    def call(self, name: str, request: Any) -> Any:
        """Make a unary call."""
        response = getattr(wire, name + "Response")
        method: Any = self.channel.unary_unary(
            SERVICE + name,
            request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=response.FromString,
        )
        return method(request, metadata=self.metadata(), timeout=WAIT_S)

    def stream(self, name: str, request: Any, timeout_s: float = WAIT_S) -> list[Any]:
        """Make a call with a stream of answers."""
        response = getattr(wire, name + "Response")
        method: Any = self.channel.unary_stream(
            SERVICE + name,
            request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=response.FromString,
        )
        return list(method(request, metadata=self.metadata(), timeout=timeout_s))

    @contextlib.contextmanager
    def telemetry(self) -> Iterator[Telemetry]:
        made = Telemetry(self)
        try:
            yield made
        finally:
            made.close()

    def endpoints(self) -> wire.Endpoints:
        return wire.Endpoints(scheme=wire.IPv4, addresses=[wire.Address(host="127.0.0.1", port=self.port)])

    def route(self, topic: str) -> Any:
        return self.call("QueryRoute", wire.QueryRouteRequest(topic=named(topic), endpoints=self.endpoints()))

    def send(self, *messages: wire.Message) -> Any:
        return self.call("SendMessage", wire.SendMessageRequest(messages=messages))

    def receive(
        self,
        group: str,
        topic: str,
        *,
        count: int = 32,
        invisible_ms: int | None = 30_000,
        polling_ms: int = 0,
        tags: str = "*",
        sql: str = "",
        attempt: str = "",
        queue_id: int = 0,
    ) -> tuple[int, list[wire.Message]]:
        """Return the status code and the messages of a receive call. Without `invisible_ms` the broker renews."""
        expression = wire.FilterExpression(type=wire.TAG, expression=tags)
        if sql:
            expression = wire.FilterExpression(type=wire.SQL, expression=sql)
        request = wire.ReceiveMessageRequest(
            group=named(group),
            message_queue=wire.MessageQueue(topic=named(topic), id=queue_id),
            filter_expression=expression,
            batch_size=count,
            auto_renew=invisible_ms is None,
        )
        request.long_polling_timeout.FromMilliseconds(polling_ms)
        if invisible_ms is not None:
            request.invisible_duration.FromMilliseconds(invisible_ms)
        if attempt:
            request.attempt_id = attempt
        answers = self.stream("ReceiveMessage", request)
        assert answers[0].WhichOneof("content") == "status", "the first answer is the status"
        return answers[0].status.code, [each.message for each in answers if each.HasField("message")]

    def ack(self, group: str, topic: str, *handles: str) -> Any:
        entries = [wire.AckMessageEntry(message_id="m", receipt_handle=handle) for handle in handles]
        return self.call("AckMessage", wire.AckMessageRequest(group=named(group), topic=named(topic), entries=entries))

    def change(self, group: str, topic: str, handle: str, invisible_ms: int) -> Any:
        request = wire.ChangeInvisibleDurationRequest(group=named(group), topic=named(topic), receipt_handle=handle)
        request.invisible_duration.FromMilliseconds(invisible_ms)
        return self.call("ChangeInvisibleDuration", request)


def named(name: str) -> wire.Resource:
    return wire.Resource(name=name)


def message(topic: str, body: bytes = b"hello", **system: Any) -> wire.Message:
    """Return a message of type NORMAL, or as the system properties say."""
    made = wire.Message(topic=named(topic), body=body)
    given = {"message_id": f"id-{next(_numbers)}", "message_type": wire.NORMAL, **system}
    made.system_properties.MergeFrom(wire.SystemProperties(**given))
    made.system_properties.body_digest.type = wire.CRC32
    made.system_properties.body_digest.checksum = f"{zlib.crc32(body):X}"
    return made


def handle_of(found: wire.Message) -> str:
    return found.system_properties.receipt_handle


def bodies(found: list[wire.Message]) -> list[bytes]:
    return [each.body for each in found]


def settings_of_consumer(group: str, kind: int = wire.SIMPLE_CONSUMER) -> wire.TelemetryCommand:
    settings = wire.Settings(client_type=kind, subscription=wire.Subscription(group=named(group)))  # type: ignore[arg-type]
    return wire.TelemetryCommand(settings=settings)


def settings_of_producer(*topics: str) -> wire.TelemetryCommand:
    publishing = wire.Publishing(topics=[named(topic) for topic in topics])
    return wire.TelemetryCommand(settings=wire.Settings(client_type=wire.PRODUCER, publishing=publishing))
