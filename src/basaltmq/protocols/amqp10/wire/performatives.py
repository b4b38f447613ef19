"""Performatives and the other composite types of AMQP 1.0: a list of fields with a descriptor.

    composite  | 0x00 | 0x53 | descriptor u8 | list of the fields; trailing nulls may be omitted |

A composite is a struct here. Its fields have the order of the wire. `_KINDS` gives the type of each field; a `!` marks
mandatory ones. Descriptors may also be symbols (`amqp:open:list`). Decoding checks every field. `frames.read_fields`
decodes the frequent performatives without a struct.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from basaltmq.protocols.amqp10.wire import types as t
from basaltmq.protocols.amqp10.wire.errors import DECODE_ERROR, INVALID_FIELD, Fault
from basaltmq.protocols.amqp10.wire.types import Described

SENDER: Final = False
RECEIVER: Final = True
"""The role of a peer on a link."""

UNSETTLED, SETTLED, MIXED = range(3)
"""Sender settle modes."""

FIRST, SECOND = range(2)
"""Receiver settle modes."""

NONE, CONFIGURATION, UNSETTLED_STATE = range(3)
"""Terminus durability."""

Map = dict[Any, Any]


class Composite(msgspec.Struct, kw_only=True):
    """A described list."""


class ErrorInfo(Composite):
    condition: str = ""
    description: str | None = None
    info: Map | None = None


class Open(Composite):
    container_id: str = ""
    hostname: str | None = None
    max_frame_size: int | None = None
    channel_max: int | None = None
    idle_time_out: int | None = None
    outgoing_locales: list[str] | None = None
    incoming_locales: list[str] | None = None
    offered_capabilities: list[str] | None = None
    desired_capabilities: list[str] | None = None
    properties: Map | None = None


class Begin(Composite):
    remote_channel: int | None = None
    next_outgoing_id: int = 0
    incoming_window: int = 0
    outgoing_window: int = 0
    handle_max: int | None = None
    offered_capabilities: list[str] | None = None
    desired_capabilities: list[str] | None = None
    properties: Map | None = None


class Source(Composite):
    address: str | None = None
    durable: int | None = None
    expiry_policy: str | None = None
    timeout: int | None = None
    dynamic: bool | None = None
    dynamic_node_properties: Map | None = None
    distribution_mode: str | None = None
    filter: Map | None = None
    default_outcome: Any = None
    outcomes: list[str] | None = None
    capabilities: list[str] | None = None


class Target(Composite):
    address: str | None = None
    durable: int | None = None
    expiry_policy: str | None = None
    timeout: int | None = None
    dynamic: bool | None = None
    dynamic_node_properties: Map | None = None
    capabilities: list[str] | None = None


class Coordinator(Composite):
    capabilities: list[str] | None = None


class Attach(Composite):
    name: str = ""
    handle: int = 0
    role: bool = SENDER
    snd_settle_mode: int | None = None
    rcv_settle_mode: int | None = None
    source: Any = None
    target: Any = None
    unsettled: Map | None = None
    incomplete_unsettled: bool | None = None
    initial_delivery_count: int | None = None
    max_message_size: int | None = None
    offered_capabilities: list[str] | None = None
    desired_capabilities: list[str] | None = None
    properties: Map | None = None


class Flow(Composite):
    next_incoming_id: int | None = None
    incoming_window: int = 0
    next_outgoing_id: int = 0
    outgoing_window: int = 0
    handle: int | None = None
    delivery_count: int | None = None
    link_credit: int | None = None
    available: int | None = None
    drain: bool | None = None
    echo: bool | None = None
    properties: Map | None = None


class Transfer(Composite):
    handle: int = 0
    delivery_id: int | None = None
    delivery_tag: bytes | None = None
    message_format: int | None = None
    settled: bool | None = None
    more: bool | None = None
    rcv_settle_mode: int | None = None
    state: Any = None
    resume: bool | None = None
    aborted: bool | None = None
    batchable: bool | None = None


class Disposition(Composite):
    role: bool = SENDER
    first: int = 0
    last: int | None = None
    settled: bool | None = None
    state: Any = None
    batchable: bool | None = None


class Detach(Composite):
    handle: int = 0
    closed: bool | None = None
    error: Any = None


class End(Composite):
    error: Any = None


class Close(Composite):
    error: Any = None


class Received(Composite):
    section_number: int = 0
    section_offset: int = 0


class Accepted(Composite):
    pass


class Rejected(Composite):
    error: Any = None


class Released(Composite):
    pass


class Modified(Composite):
    delivery_failed: bool | None = None
    undeliverable_here: bool | None = None
    message_annotations: Map | None = None


class Declare(Composite):
    global_id: Any = None


class Discharge(Composite):
    txn_id: bytes = b""
    fail: bool | None = None


class Declared(Composite):
    txn_id: bytes = b""


class TransactionalState(Composite):
    txn_id: bytes = b""
    outcome: Any = None


class DeleteOnClose(Composite):
    pass


class DeleteOnNoLinks(Composite):
    pass


class DeleteOnNoMessages(Composite):
    pass


class DeleteOnNoLinksOrMessages(Composite):
    pass


class SaslMechanisms(Composite):
    mechanisms: list[str] | None = None


class SaslInit(Composite):
    mechanism: str = ""
    initial_response: bytes | None = None
    hostname: str | None = None


class SaslChallenge(Composite):
    challenge: bytes = b""


class SaslResponse(Composite):
    response: bytes = b""


class SaslOutcome(Composite):
    code: int = 0
    additional_data: bytes | None = None


_SOURCE_END: Final = "str u32 sym u32 bool map"
_LINK_END: Final = "syms syms map"

_KINDS: Final[dict[type[Composite], tuple[int, str, str]]] = {
    Open: (0x10, "open", f"str! str u32 u16 u32 syms syms {_LINK_END}"),
    Begin: (0x11, "begin", f"u16 u32! u32! u32! u32 {_LINK_END}"),
    Attach: (0x12, "attach", f"str! u32! bool! u8 u8 any any map bool u32 u64 {_LINK_END}"),
    Flow: (0x13, "flow", "u32 u32! u32! u32! u32 u32 u32 u32 bool bool map"),
    Transfer: (0x14, "transfer", "u32! u32 bin u32 bool bool u8 any bool bool bool"),
    Disposition: (0x15, "disposition", "bool! u32! u32 bool any bool"),
    Detach: (0x16, "detach", "u32! bool any"),
    End: (0x17, "end", "any"),
    Close: (0x18, "close", "any"),
    ErrorInfo: (0x1D, "error", "sym! str map"),
    Received: (0x23, "received", "u32! u64!"),
    Accepted: (0x24, "accepted", ""),
    Rejected: (0x25, "rejected", "any"),
    Released: (0x26, "released", ""),
    Modified: (0x27, "modified", "bool bool map"),
    Source: (0x28, "source", f"{_SOURCE_END} sym map any syms syms"),
    Target: (0x29, "target", f"{_SOURCE_END} syms"),
    DeleteOnClose: (0x2B, "delete-on-close", ""),
    DeleteOnNoLinks: (0x2C, "delete-on-no-links", ""),
    DeleteOnNoMessages: (0x2D, "delete-on-no-messages", ""),
    DeleteOnNoLinksOrMessages: (0x2E, "delete-on-no-links-or-messages", ""),
    Coordinator: (0x30, "coordinator", "syms"),
    Declare: (0x31, "declare", "any"),
    Discharge: (0x32, "discharge", "bin! bool"),
    Declared: (0x33, "declared", "bin!"),
    TransactionalState: (0x34, "transactional-state", "bin! any"),
    SaslMechanisms: (0x40, "sasl-mechanisms", "syms!"),
    SaslInit: (0x41, "sasl-init", "sym! bin str"),
    SaslChallenge: (0x42, "sasl-challenge", "bin!"),
    SaslResponse: (0x43, "sasl-response", "bin!"),
    SaslOutcome: (0x44, "sasl-outcome", "u8! bin"),
}
"""Descriptor, name, and the kinds of the fields."""


def _integer(bits: int) -> Callable[[Any], int]:
    limit = 1 << bits

    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
            raise TypeError(f"not an unsigned integer of {bits} bits")
        return int(value)

    return check


def _of(kind: type, what: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"not {what}")
        return value

    return check


def _symbols(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return list(value)
    raise TypeError("not symbols")


def _any(value: Any) -> Any:
    """Return the composite of a described value, or the value itself."""
    if isinstance(value, Described):
        found = find(value.descriptor)
        if found is not None:
            return of_described(value)
    return value


_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "u8": _integer(8),
    "u16": _integer(16),
    "u32": _integer(32),
    "u64": _integer(64),
    "bool": _of(bool, "a boolean"),
    "str": _of(str, "a string"),
    "sym": _of(str, "a symbol"),
    "bin": _of(bytes, "binary"),
    "map": _of(dict, "a map"),
    "syms": _symbols,
    "any": _any,
}

_ENCODERS: Final[dict[str, Callable[[Any], bytes]]] = {
    "u8": lambda value: bytes((0x50, value)),
    "u16": lambda value: t.encode(t.Ushort(value)),
    "u32": t.encode_uint,
    "u64": t.encode_ulong,
    "bool": t.encode,
    "str": t.encode_string,
    "sym": t.encode_symbol,
    "bin": t.encode_binary,
    "map": lambda value: t.encode(
        {name: t.Encoded(encode(each)) if isinstance(each, Composite) else each for name, each in value.items()}
    ),
    "syms": lambda value: t.encode(t.symbols(value)),
    "any": lambda value: encode(value) if isinstance(value, Composite) else t.encode(value),
}


class _Layout:
    """The fields of a composite type."""

    __slots__ = ("cls", "descriptor", "encoders", "fields", "head", "name")

    def __init__(self, cls: type[Composite], descriptor: int, name: str, kinds: str) -> None:
        self.cls = cls
        self.name = name
        self.head = bytes((0, 0x53, descriptor))
        names = cls.__struct_fields__
        each = kinds.split()
        assert len(each) == len(names), name
        self.fields = [
            (field, _DECODERS[kind.rstrip("!")], kind.endswith("!")) for field, kind in zip(names, each, strict=True)
        ]
        self.encoders = [(field, _ENCODERS[kind.rstrip("!")]) for field, kind in zip(names, each, strict=True)]


_LAYOUTS: Final = {cls: _Layout(cls, *spec) for cls, spec in _KINDS.items()}
_BY_DESCRIPTOR: Final[dict[Any, _Layout]] = {
    key: _LAYOUTS[cls] for cls, (descriptor, name, _) in _KINDS.items() for key in (descriptor, f"amqp:{name}:list")
}

AnyComposite = TypeVar("AnyComposite", bound=Composite)


def find(descriptor: object) -> type[Composite] | None:
    """Return the composite type of a descriptor."""
    layout = _BY_DESCRIPTOR.get(descriptor) if isinstance(descriptor, int | str) else None
    return None if layout is None else layout.cls


def of_described(value: Described) -> Composite:
    """Return the composite of a described list, checked."""
    layout = _BY_DESCRIPTOR.get(value.descriptor) if isinstance(value.descriptor, int | str) else None
    if layout is None:
        raise Fault(DECODE_ERROR, f"unknown descriptor {value.descriptor!r:.80}")
    values = value.value
    if not isinstance(values, list) or isinstance(values, t.Array | t.Pairs):
        raise Fault(DECODE_ERROR, f"{layout.name} must be a list")
    if len(values) > len(layout.fields):
        raise Fault(DECODE_ERROR, f"{layout.name} has {len(values)} fields, at most {len(layout.fields)} are defined")
    found = layout.cls()
    for number, (name, convert, is_mandatory) in enumerate(layout.fields):
        given = values[number] if number < len(values) else None
        if given is None:
            if is_mandatory:
                raise Fault(INVALID_FIELD, f"{layout.name} has no {name.replace('_', '-')}, which is mandatory")
            continue
        try:
            setattr(found, name, convert(given))
        except TypeError as error:
            raise Fault(DECODE_ERROR, f"{name.replace('_', '-')} of {layout.name} is {error}") from None
    return found


def decode(raw: bytes, at: int, end: int) -> tuple[Composite, int]:
    """Decode the composite at `at`. Return it and the position after it."""
    value, at = t.decode(raw, at, end)
    if not isinstance(value, Described):
        raise Fault(DECODE_ERROR, "a frame must begin with a described list")
    return of_described(value), at


def encode(composite: Composite) -> bytes:
    """Encode a composite without trailing nulls."""
    layout = _LAYOUTS[type(composite)]
    parts: list[bytes] = []
    count = 0
    for number, (name, encoder) in enumerate(layout.encoders):
        value = getattr(composite, name)
        if value is None:
            parts.append(b"\x40")
        else:
            parts.append(encoder(value))
            count = number + 1
    if not count:
        return layout.head + b"\x45"
    return layout.head + t.encode_compound(0xC0, count, b"".join(parts[:count]))


def expect(value: Any, cls: type[AnyComposite]) -> AnyComposite | None:
    """Return the value if it has the type, None if it is None."""
    if value is None or isinstance(value, cls):
        return value
    raise Fault(DECODE_ERROR, f"expected {_KINDS[cls][1]}, got {type(value).__name__.lower()}")


def error_of(condition: str, text: str, info: Map | None = None) -> ErrorInfo:
    return ErrorInfo(condition=condition, description=text, info=info)
