"""An MQTT client for tests: paho-mqtt with bounded waits, and its own record of what it received."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, Literal, Self

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions
from tests.interop.server import Broker

WAIT_S = 60.0
V31: Final = MQTTProtocolVersion.MQTTv31
V311: Final = MQTTProtocolVersion.MQTTv311
V5: Final = MQTTProtocolVersion.MQTTv5


def properties(kind: int, **fields: Any) -> Properties:
    """Properties of a packet, by the names of paho."""
    made: Any = Properties(kind)
    for name, value in fields.items():
        setattr(made, name, value)
    found: Properties = made
    return found


def publish_properties(**fields: Any) -> Properties:
    return properties(PacketTypes.PUBLISH, **fields)


class Device:
    """A client that connects at once, unless `connect` is False."""

    def __init__(
        self,
        port: int,
        client_id: str = "",
        *,
        version: MQTTProtocolVersion = V5,
        clean: bool = True,
        expiry_s: int = 0,
        user: str | None = None,
        password: str | None = None,
        will: dict[str, Any] | None = None,
        acks: bool = True,
        connect: bool = True,
        keep_alive_s: int = 60,
        connect_fields: dict[str, Any] | None = None,
        transport: Literal["tcp", "websockets"] = "tcp",
        tls: dict[str, Any] | None = None,
    ) -> None:
        self.port = port
        self.messages: list[Any] = []
        self.connack: Any = None
        self.disconnect_code: Any = None
        self.acknowledged: dict[int, Any] = {}
        self.granted: dict[int, list[Any]] = {}
        self.unsubscribed: dict[int, list[Any]] = {}
        self._changed = threading.Condition()
        options: dict[str, Any] = {} if version == V5 else {"clean_session": clean}
        self.client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            protocol=version,
            transport=transport,
            manual_ack=not acks,
            **options,
        )
        if user is not None:
            self.client.username_pw_set(user, password)
        if tls is not None:
            self.client.tls_set(**tls)
        if will is not None:
            self.client.will_set(**will)
        self.client.on_connect = self._on_connect
        self.client.on_disconnect = self._on_disconnect
        self.client.on_message = self._on_message
        self.client.on_publish = self._on_publish
        self.client.on_subscribe = self._on_subscribe
        self.client.on_unsubscribe = self._on_unsubscribe
        self.client.reconnect_delay_set(3600, 7200)  # Tests reconnect themselves.
        given: dict[str, Any] = {"keepalive": keep_alive_s}
        if version == V5:
            given["clean_start"] = clean
            fields = dict(connect_fields or {})
            if expiry_s:
                fields["SessionExpiryInterval"] = expiry_s
            given["properties"] = properties(PacketTypes.CONNECT, **fields)
        self._given = given
        if connect:
            self.connect()

    def connect(self) -> Self:
        self.connack = self.disconnect_code = None
        self.client.connect("127.0.0.1", self.port, **self._given)
        self.client.loop_start()
        self.until(lambda: self.connack is not None or self.disconnect_code is not None)
        return self

    def _note(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()

    def _on_connect(self, client: Any, data: Any, flags: Any, code: Any, found: Any) -> None:
        self._note(lambda: setattr(self, "connack", (flags.session_present, code, found)))

    def _on_disconnect(self, client: Any, data: Any, flags: Any, code: Any, found: Any) -> None:
        self._note(lambda: setattr(self, "disconnect_code", code))

    def _on_message(self, client: Any, data: Any, message: paho.MQTTMessage) -> None:
        self._note(lambda: self.messages.append(message))

    def _on_publish(self, client: Any, data: Any, mid: int, code: Any, found: Any) -> None:
        self._note(lambda: self.acknowledged.__setitem__(mid, code))

    def _on_subscribe(self, client: Any, data: Any, mid: int, codes: Any, found: Any) -> None:
        self._note(lambda: self.granted.__setitem__(mid, [each.value for each in codes]))

    def _on_unsubscribe(self, client: Any, data: Any, mid: int, codes: Any, found: Any) -> None:
        self._note(lambda: self.unsubscribed.__setitem__(mid, codes))

    def until(self, done: Callable[[], bool], wait_s: float = WAIT_S) -> None:
        end_s = time.monotonic() + wait_s
        with self._changed:
            while not done():
                if time.monotonic() > end_s:
                    raise AssertionError(f"nothing happened in {wait_s} s; received {self.payloads()[-20:]}")
                # Not longer, because `done` may look at other devices, which notify their own waits.
                self._changed.wait(0.1)

    @property
    def session_present(self) -> bool:
        return bool(self.connack[0])

    def subscribe(self, topic_filter: str, qos: int = 1, **options: Any) -> int:
        """Subscribe and return the reason code."""
        given: dict[str, Any] = {}
        identifier = options.pop("identifier", None)
        if identifier is not None:
            given["properties"] = properties(PacketTypes.SUBSCRIBE, SubscriptionIdentifier=identifier)
        if self.client.protocol == V5:
            given["options"] = SubscribeOptions(qos, **options)
        else:
            given["qos"] = qos
        mid = self.client.subscribe(topic_filter, **given)[1]
        assert mid is not None, "not connected"
        self.until(lambda: mid in self.granted)
        return int(self.granted[mid][0])

    def unsubscribe(self, topic_filter: str) -> Any:
        mid = self.client.unsubscribe(topic_filter)[1]
        assert mid is not None, "not connected"
        self.until(lambda: mid in self.unsubscribed)
        codes = self.unsubscribed[mid]
        return codes[0].value if codes else None

    def publish(self, topic: str, payload: bytes, qos: int = 1, *, retain: bool = False, **fields: Any) -> int:
        """Publish, and wait for the acknowledgement. Return its reason code."""
        given = publish_properties(**fields) if fields else None
        sent = self.client.publish(topic, payload, qos, retain, given)
        self.until(lambda: sent.mid in self.acknowledged)
        return int(self.acknowledged[sent.mid].value)

    def wait(self, count: int) -> list[Any]:
        """Wait for a number of messages, and return all."""
        self.until(lambda: len(self.messages) >= count)
        return self.messages

    def payloads(self) -> list[bytes]:
        return [bytes(each.payload) for each in self.messages]

    def settle(self, seconds: float = 0.3) -> list[bytes]:
        """Wait until no message has come for a while. Only for checks that nothing more comes."""
        count = -1
        while count != len(self.messages):
            count = len(self.messages)
            time.sleep(seconds)
        return self.payloads()

    def disconnect(self, **fields: Any) -> None:
        given = properties(PacketTypes.DISCONNECT, **fields) if fields else None
        self.client.disconnect(properties=given)
        self._end()

    def drop(self) -> None:
        """Lose the connection without DISCONNECT."""
        sock: Any = self.client.socket()
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(2)
        self._end()

    def _end(self) -> None:
        self.client.loop_stop()
        # paho leaves the sockets that wake its thread to the garbage collector.
        self.client._reset_sockets()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.disconnect()
        self._end()


@contextlib.contextmanager
def several(*devices: Device) -> Iterator[None]:
    """End all devices of a test."""
    try:
        yield
    finally:
        for device in devices:
            device.__exit__(None, None, None)


def wait_for_messages(broker: Broker, client_id: str, messages: int) -> None:
    """Wait until a session holds this number of messages: the others were acknowledged or have expired."""
    until = time.monotonic() + WAIT_S
    while broker.call("GET", f"/api/mqtt/sessions/%2F/{client_id}")["messages"] != messages:
        assert time.monotonic() < until
        time.sleep(0.05)
