"""The settings of a broker: one tree, from which TOML keys, environment variables and flags derive.

    amqp.port    in the file     [amqp]
                                 port = 5672
                 environment     BASALT_AMQP_PORT=5672
                 flag            --amqp-port 5672

A leaf says its type, bounds and meaning where it stands; nothing else in the program repeats them. `Reload.LIVE` marks
what a running broker takes over on SIGHUP, everything else asks for a restart. Secrets have no flag, because command
lines are seen by every process of a machine, and are never shown.

Reading the sources and naming what is wrong with them is left to `config_sources`.
"""

from __future__ import annotations

import enum
import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import msgspec

from basaltmq.errors import InvalidConfigError

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

_UNITS: Final = {"": 1, "b": 1, "k": KIB, "kb": KIB, "kib": KIB, "m": MIB, "mb": MIB, "mib": MIB}
_UNITS_LARGE: Final = {"g": GIB, "gb": GIB, "gib": GIB, "t": 1024 * GIB, "tb": 1024 * GIB, "tib": 1024 * GIB}
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_PERCENT: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


class ByteCount(int):
    """A number of bytes, written as a number or as text with a unit: 1048576, "1MiB", "1.5 GiB"."""

    @classmethod
    def parse(cls, given: object) -> Self:
        if isinstance(given, int) and not isinstance(given, bool):
            count = given
        elif isinstance(given, str) and (found := _SIZE.fullmatch(given)):
            unit = (_UNITS | _UNITS_LARGE).get(found[2].lower())
            if unit is None:
                raise ValueError(f"{found[2]!r} is not a unit; use KiB, MiB, GiB or TiB")
            count = int(float(found[1]) * unit)
        else:
            raise ValueError(f'expected a size such as 1048576 or "64MiB", got {given!r}')
        if count < 0:
            raise ValueError(f"a size is not negative, got {count}")
        return cls(count)

    def __str__(self) -> str:
        for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
            if self and self % unit == 0:
                return f"{int(self) // unit}{name}"
        return f"{int(self)}B"


class Share(msgspec.Struct, frozen=True):
    """A part of something: in per cent of it ("60%"), or as a size ("4GiB")."""

    percent: float | None = None
    size_bytes: ByteCount | None = None

    @classmethod
    def parse(cls, given: object) -> Self:
        if isinstance(given, str) and (found := _PERCENT.fullmatch(given)):
            percent = float(found[1])
            if not 0 < percent <= 100:
                raise ValueError(f"a share lies above 0% and up to 100%, got {given!r}")
            return cls(percent=percent)
        try:
            return cls(size_bytes=ByteCount.parse(given))
        except ValueError:
            raise ValueError(f'expected a share such as "60%" or a size such as "4GiB", got {given!r}') from None

    def of(self, total_bytes: int) -> int:
        """The size in bytes, of a whole of `total_bytes`."""
        if self.size_bytes is not None:
            return int(self.size_bytes)
        return int(total_bytes * (self.percent or 0) / 100)

    def __str__(self) -> str:
        return str(self.size_bytes) if self.size_bytes is not None else f"{self.percent:g}%"


class Reload(enum.Enum):
    """What a change of a setting asks for."""

    LIVE = "live"
    RESTART = "restart"


def setting(
    meaning: str,
    *,
    ge: int | None = None,
    le: int | None = None,
    reload: Reload = Reload.RESTART,
    secret: bool = False,
) -> msgspec.Meta:
    """The annotation of a leaf."""
    return msgspec.Meta(description=meaning, ge=ge, le=le, extra={"reload": reload, "secret": secret})


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file."""


class AmqpListener(Section, frozen=True):
    """AMQP 0-9-1: what RabbitMQ's clients speak."""

    enabled: Annotated[bool, setting("Listen at all.")] = True
    host: Annotated[str, setting("Address to listen on; empty takes `host`.")] = ""
    port: Annotated[int, setting("Port; 0 takes a free one.", ge=0, le=65535)] = 5672


class AmqpsListener(Section, frozen=True):
    """AMQP 0-9-1 over TLS; needs the files of `tls`."""

    enabled: Annotated[bool, setting("Listen at all.")] = False
    host: Annotated[str, setting("Address to listen on; empty takes `host`.")] = ""
    port: Annotated[int, setting("Port; 0 takes a free one.", ge=0, le=65535)] = 5671


class AdminListener(Section, frozen=True):
    """HTTP for administration: API, documentation, metrics."""

    enabled: Annotated[bool, setting("Listen at all.")] = True
    host: Annotated[str, setting("Address to listen on; empty takes `host`.")] = ""
    port: Annotated[int, setting("Port; 0 takes a free one.", ge=0, le=65535)] = 15672
    tls: Annotated[bool, setting("Speak HTTPS, with the files of `tls`.")] = False
    body_bytes_max: Annotated[
        ByteCount, setting("Largest request body; definitions of a large broker are the reason for its size.")
    ] = ByteCount(64 * MIB)
    connections_max: Annotated[int, setting("Connections at once; more are refused with 503.", ge=1)] = 256
    metrics_public: Annotated[
        bool, setting("Serve /metrics without a password. /metrics/per-object needs one.", reload=Reload.LIVE)
    ] = True
    allowed_hosts: Annotated[
        tuple[str, ...],
        setting(
            "Host names that clients use for this broker, besides loopback names, its own addresses and the machine's "
            'name; with or without a port. "*" accepts any.',
            reload=Reload.LIVE,
        ),
    ] = ()
    backup_dir: Annotated[
        Path | None,
        setting("Directory for backups made through the API; none takes `backups` in `data_dir`.", reload=Reload.LIVE),
    ] = None


class FilaListener(Section, frozen=True):
    """gRPC for lease queues: what Fila's clients speak."""

    enabled: Annotated[bool, setting("Listen at all.")] = True
    host: Annotated[str, setting("Address to listen on; empty takes `host`.")] = ""
    port: Annotated[int, setting("Port; 0 takes a free one.", ge=0, le=65535)] = 5555
    tls: Annotated[bool, setting("Speak TLS, with the files of `tls`.")] = False
    vhost: Annotated[str, setting("The virtual host whose queues are served.")] = "/"
    access: Annotated[
        Literal["keys", "loopback"],
        setting("Who needs an API key or a user: everybody, or everybody but this machine (`auth.anonymous_user`)."),
    ] = "loopback"
    ack_from: Annotated[
        Literal["holder", "any"],
        setting("Who may ack what a stream delivered: the connection it went to, or any (behind a proxy)."),
    ] = "holder"


class KafkaListener(Section, frozen=True):
    """Kafka's protocol, for the streams of one virtual host."""

    enabled: Annotated[bool, setting("Listen at all.")] = True
    host: Annotated[str, setting("Address to listen on; empty takes `host`.")] = ""
    port: Annotated[int, setting("Port; 0 takes a free one.", ge=0, le=65535)] = 9092
    tls: Annotated[bool, setting("Speak TLS, with the files of `tls`.")] = False
    vhost: Annotated[str, setting("The virtual host whose streams are served.")] = "/"
    access: Annotated[
        Literal["users", "loopback"],
        setting("Who has to log in (SASL): everybody, or everybody but this machine (`auth.anonymous_user`)."),
    ] = "loopback"
    advertised_host: Annotated[
        str, setting("How clients reach the broker, where it is not the address they connect to.")
    ] = ""
    advertised_port: Annotated[int, setting("The port to it; 0 takes the listener's.", ge=0, le=65535)] = 0
    auto_create: Annotated[bool, setting("Make a topic when a client asks for one that is not there.")] = True
    partitions: Annotated[int, setting("Partitions of topics made without saying how many.", ge=1, le=10_000)] = 1
    durability: Annotated[
        Literal["written", "synced"],
        setting("What acks=all waits for in topics made without `basalt.durability`: the write, or the disk."),
    ] = "synced"
    request_bytes_max: Annotated[ByteCount, setting("Largest request.")] = ByteCount(100 * MIB)


class Tls(Section, frozen=True):
    """Certificates. The files are read again on SIGHUP, for connections made from then on."""

    certificate: Annotated[
        Path | None, setting("PEM file with the server's certificate and what signed it.", reload=Reload.LIVE)
    ] = None
    key: Annotated[Path | None, setting("PEM file with its private key.", reload=Reload.LIVE)] = None
    authority: Annotated[
        Path | None, setting("PEM file with who may sign clients' certificates.", reload=Reload.LIVE)
    ] = None
    clients: Annotated[
        Literal["ignore", "ask", "require"],
        setting("Certificates of clients: not asked for, checked when sent, or demanded.", reload=Reload.LIVE),
    ] = "ignore"
    version_min: Annotated[Literal["1.2", "1.3"], setting("Oldest TLS spoken.", reload=Reload.LIVE)] = "1.2"


class Limits(Section, frozen=True):
    """What one client may ask for."""

    connections_max: Annotated[int, setting("Connections at once, of all protocols but HTTP.", ge=1)] = 10_000
    channels_max: Annotated[int, setting("Channels of one AMQP connection.", ge=1, le=65535)] = 2047
    frame_bytes_max: Annotated[int, setting("Largest AMQP frame offered to a client.", ge=4096, le=1 << 27)] = 131_072
    message_bytes_max: Annotated[ByteCount, setting("Largest message body.")] = ByteCount(16 * MIB)
    heartbeat_s: Annotated[int, setting("AMQP heartbeat offered to a client; 0 offers none.", ge=0, le=65535)] = 60
    handshake_timeout_ms: Annotated[int, setting("Time a client has from connecting to an open connection.", ge=1)] = (
        10_000
    )


class Memory(Section, frozen=True):
    """Where memory goes, and when publishers are held. Consumers never are."""

    high_watermark: Annotated[
        Share,
        setting(
            "Resident memory above which publishers are held; a share is one of the machine's or the "
            "container's memory.",
            reload=Reload.LIVE,
        ),
    ] = Share(percent=60.0)
    cache_bytes: Annotated[ByteCount, setting("Block cache of all stores together.")] = ByteCount(64 * MIB)
    write_buffer_bytes: Annotated[ByteCount, setting("Write buffers of all stores together.")] = ByteCount(128 * MIB)


class Disk(Section, frozen=True):
    """When publishers are held because the disk is nearly full."""

    free_min: Annotated[
        Share,
        setting(
            "Free space below which publishers are held; a share is one of the file system's size.", reload=Reload.LIVE
        ),
    ] = Share(size_bytes=ByteCount(512 * MIB))
    vhost_max: Annotated[
        ByteCount,
        setting("Size of one virtual host's store above which its publishers are held until it shrinks; 0: no limit."),
    ] = ByteCount(0)
    reserve: Annotated[
        ByteCount,
        setting(
            "Size of a preallocated file that is deleted when the disk is full, so that consumers can drain; 0: none."
        ),
    ] = ByteCount(64 * MIB)


class Vhosts(Section, frozen=True):
    """Virtual hosts."""

    on_failure: Annotated[
        Literal["continue", "stop_node"],
        setting("When one stays down after its restarts: the others go on, or the broker stops."),
    ] = "continue"
    restarts_max: Annotated[int, setting("Restarts of one virtual host within the window.", ge=0)] = 3
    restart_window_s: Annotated[int, setting("The window in which restarts are counted.", ge=1)] = 300


class Auth(Section, frozen=True):
    """Who may come in. The default user is made when the broker starts with an empty data directory."""

    default_user: Annotated[str, setting("Name of the first user, an administrator; empty makes none.")] = "guest"
    default_password: Annotated[str, setting("Password of the first user.", secret=True)] = "guest"  # noqa: S105
    loopback_users: Annotated[tuple[str, ...], setting("Users let in from this machine only.", reload=Reload.LIVE)] = (
        "guest",
    )
    anonymous_user: Annotated[
        str,
        setting(
            "User of Kafka and gRPC clients on this machine that send no credentials. They have its permissions, "
            "never its tags; empty: they are refused.",
            reload=Reload.LIVE,
        ),
    ] = "guest"


class Events(Section, frozen=True):
    """What happens to messages in queues, told to the topic `__events` of their virtual host (docs/PIPELINE.md)."""

    sample: Annotated[
        float, setting("Share of messages whose life is told, 0 to 1; 0 tells nothing and costs nothing.", ge=0, le=1)
    ] = 0.0


class Log(Section, frozen=True):
    """What is written to stderr."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], setting("Least serious lines shown.", reload=Reload.LIVE)
    ] = "info"
    format: Annotated[
        Literal["text", "json"], setting("Lines for people, or an object per line.", reload=Reload.LIVE)
    ] = "text"


class Stop(Section, frozen=True):
    """How the broker ends."""

    grace_ms: Annotated[
        int, setting("Time for confirms and clients to finish; then they are cut.", ge=0, reload=Reload.LIVE)
    ] = 10_000


class Config(Section, frozen=True):
    """The whole tree."""

    data_dir: Annotated[Path, setting("Where everything is kept.")] = Path("data")
    host: Annotated[
        str,
        setting(
            "Address of every listener without one of its own: 127.0.0.1 for this machine only, 0.0.0.0 or :: for all."
        ),
    ] = "127.0.0.1"
    node_name: Annotated[str, setting("How the broker calls itself; empty takes basalt@ and the machine's name.")] = ""
    load_definitions: Annotated[
        Path | None,
        setting("A file of definitions, RabbitMQ's or ours, taken over at every start before clients are let in."),
    ] = None
    amqp: AmqpListener = AmqpListener()
    amqps: AmqpsListener = AmqpsListener()
    admin: AdminListener = AdminListener()
    fila: FilaListener = FilaListener()
    kafka: KafkaListener = KafkaListener()
    tls: Tls = Tls()
    limits: Limits = Limits()
    memory: Memory = Memory()
    disk: Disk = Disk()
    vhosts: Vhosts = Vhosts()
    auth: Auth = Auth()
    events: Events = Events()
    log: Log = Log()
    stop: Stop = Stop()

    def check(self) -> None:
        """Raise InvalidConfigError for settings that do not go together."""
        asked = {
            "amqps.enabled": self.amqps.enabled,
            "admin.tls": self.admin.enabled and self.admin.tls,
            "fila.tls": self.fila.enabled and self.fila.tls,
            "kafka.tls": self.kafka.enabled and self.kafka.tls,
        }
        needs_tls = [name for name, asks in asked.items() if asks]
        if needs_tls and (self.tls.certificate is None or self.tls.key is None):
            raise InvalidConfigError(
                f"{needs_tls[0]} needs tls.certificate and tls.key: give both PEM files, or set {needs_tls[0]} = false"
            )
        if self.tls.clients != "ignore" and self.tls.authority is None:
            raise InvalidConfigError(
                f'tls.clients = "{self.tls.clients}" needs tls.authority: a PEM file with who signs their certificates'
            )
        taken: dict[tuple[str, int], str] = {}
        for name, host, port in self.endpoints():
            other = taken.setdefault((host, port), name)
            if port and other != name:
                raise InvalidConfigError(f"{other}.port and {name}.port are both {port} on {host}; give each its own")

    def endpoints(self) -> list[tuple[str, str, int]]:
        """(section, address, port) of every enabled listener."""
        sections: list[tuple[str, Any]] = [
            ("amqp", self.amqp),
            ("amqps", self.amqps),
            ("admin", self.admin),
            ("fila", self.fila),
            ("kafka", self.kafka),
        ]
        return [(name, each.host or self.host, each.port) for name, each in sections if each.enabled]

    @property
    def name(self) -> str:
        return self.node_name or f"basalt@{os.uname().nodename}"


class Leaf(msgspec.Struct, frozen=True):
    """One setting, as the sources see it."""

    path: tuple[str, ...]
    type: Any
    default: Any
    meaning: str
    reload: Reload
    secret: bool

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        return "BASALT_" + "_".join(self.path).upper()

    @property
    def flag(self) -> str:
        return "--" + "-".join(self.path).replace("_", "-")


def leaves(tree: type[Section] = Config, path: tuple[str, ...] = ()) -> list[Leaf]:
    """Every setting, in the order of the tree."""
    found: list[Leaf] = []
    for field in msgspec.structs.fields(tree):
        here = (*path, field.name)
        if isinstance(field.type, type) and issubclass(field.type, Section):
            found += leaves(field.type, here)
            continue
        meta = field.type.__metadata__[0]
        found.append(
            Leaf(here, field.type, field.default, meta.description, meta.extra["reload"], meta.extra["secret"])
        )
    return found


def value_of(config: Config, leaf: Leaf) -> Any:
    """What a setting is."""
    value: Any = config
    for name in leaf.path:
        value = getattr(value, name)
    return value
