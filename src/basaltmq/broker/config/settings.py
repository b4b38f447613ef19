"""The settings of the broker: a tree that defines TOML keys, environment variables and flags.

    amqp.port    in the file     [amqp]
                                 port = 5672
                 environment     BASALT_AMQP_PORT=5672
                 flag            --amqp-port 5672

Each leaf defines its type, bounds and description in one place. A running broker applies `Reload.LIVE` settings on
SIGHUP; all others require a restart. Secrets have no flag, because every process of a machine can read command lines,
and they are never printed.

`config/sources.py` reads the sources and reports their errors.
"""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from basaltmq.broker.config.sizes import MIB, ByteCount, Share
from basaltmq.errors import InvalidConfigError


class Reload(enum.Enum):
    """How a changed setting takes effect."""

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
    """Return the annotation of a leaf."""
    return msgspec.Meta(description=meaning, ge=ge, le=le, extra={"reload": reload, "secret": secret})


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the settings file."""


Enabled = Annotated[bool, setting("Whether this listener is on.")]
Host = Annotated[str, setting("Address to listen on; if empty, the value of `host`.")]
Port = Annotated[int, setting("TCP port; 0 selects a free port.", ge=0, le=65535)]
UseTls = Annotated[bool, setting("Use TLS with the certificate of `tls`.")]
LoginAccess = Annotated[
    Literal["users", "loopback"],
    setting(
        "Who must log in: `users` means all clients, `loopback` means all but local clients, which act as "
        "`auth.anonymous_user`."
    ),
]


class AmqpListener(Section, frozen=True):
    """The listener for AMQP 0-9-1 and 1.0."""

    enabled: Enabled = True
    host: Host = ""
    port: Port = 5672
    product: Annotated[
        Literal["RabbitMQ", "Basalt"],
        setting(
            "Product announced to AMQP 1.0 clients. RabbitMQ's client libraries accept only RabbitMQ, from 4.0 on."
        ),
    ] = "RabbitMQ"


class AmqpsListener(Section, frozen=True):
    """The listener for AMQP 0-9-1 and 1.0 over TLS. It requires `tls.certificate` and `tls.key`."""

    enabled: Enabled = False
    host: Host = ""
    port: Port = 5671


class AdminListener(Section, frozen=True):
    """The HTTP listener for the admin API, its documentation and metrics."""

    enabled: Enabled = True
    host: Host = ""
    port: Port = 15672
    tls: Annotated[bool, setting("Use HTTPS with the certificate of `tls`.")] = False
    body_bytes_max: Annotated[
        ByteCount, setting("Maximum request body size; definitions of a large broker need many megabytes.")
    ] = ByteCount(64 * MIB)
    connections_max: Annotated[
        int, setting("Maximum concurrent connections; further ones are refused with status 503.", ge=1)
    ] = 256
    metrics_public: Annotated[
        bool,
        setting("Serve /metrics without authentication. /metrics/per-object always requires it.", reload=Reload.LIVE),
    ] = True
    allowed_hosts: Annotated[
        tuple[str, ...],
        setting(
            "Additional Host header values that are accepted, with or without a port. Loopback names, the broker's own "
            'addresses and the machine\'s name are always accepted; "*" accepts any.',
            reload=Reload.LIVE,
        ),
    ] = ()
    backup_dir: Annotated[
        Path | None,
        setting("Directory for backups made through the API; default: `backups` in `data_dir`.", reload=Reload.LIVE),
    ] = None


class FilaListener(Section, frozen=True):
    """The gRPC listener for lease queues, for Fila clients."""

    enabled: Enabled = True
    host: Host = ""
    port: Port = 5555
    tls: UseTls = False
    vhost: Annotated[str, setting("The virtual host whose queues are served.")] = "/"
    access: Annotated[
        Literal["keys", "loopback"],
        setting(
            "Who must authenticate with an API key or as a user: `keys` means all clients, `loopback` means all but "
            "local clients, which act as `auth.anonymous_user`."
        ),
    ] = "loopback"
    ack_from: Annotated[
        Literal["holder", "any"],
        setting(
            "Which connection may acknowledge a streamed message: `holder`, the one that received it, or `any` "
            "(for clients behind a proxy)."
        ),
    ] = "holder"


class KafkaListener(Section, frozen=True):
    """The Kafka listener, for the streams of one virtual host."""

    enabled: Enabled = True
    host: Host = ""
    port: Port = 9092
    tls: UseTls = False
    vhost: Annotated[str, setting("The virtual host whose streams are served.")] = "/"
    access: LoginAccess = "loopback"
    advertised_host: Annotated[
        str, setting("Host name that clients are given for the broker; if empty, the address they connect to.")
    ] = ""
    advertised_port: Annotated[
        int, setting("Port that clients are given for the broker; 0 means the listener's port.", ge=0, le=65535)
    ] = 0
    auto_create: Annotated[bool, setting("Create a topic when a client requests one that does not exist.")] = True
    partitions: Annotated[
        int, setting("Number of partitions of topics created without a partition count.", ge=1, le=10_000)
    ] = 1
    durability: Annotated[
        Literal["written", "synced"],
        setting(
            "What acks=all waits for in topics without `basalt.durability`: `written`, the write call, or `synced`, "
            "the fsync."
        ),
    ] = "synced"
    skip_damaged: Annotated[
        bool,
        setting(
            "Skip batches that cannot be read, and log their offsets. Otherwise a fetch of one returns CORRUPT_MESSAGE "
            "until the consumer seeks."
        ),
    ] = True
    request_bytes_max: Annotated[ByteCount, setting("Maximum request size.")] = ByteCount(100 * MIB)


class MqttListener(Section, frozen=True):
    """The MQTT listener (3.1, 3.1.1 and 5.0). Its settings apply to `mqtts` and `mqtt_ws` too."""

    enabled: Enabled = True
    host: Host = ""
    port: Port = 1883
    vhost: Annotated[str, setting("The virtual host of clients whose user name does not name one (`vhost:user`).")] = (
        "/"
    )
    exchange: Annotated[str, setting("The topic exchange that clients publish to and subscribe from.")] = "amq.topic"
    access: LoginAccess = "loopback"
    packet_bytes_max: Annotated[ByteCount, setting("Maximum packet size.")] = ByteCount(16 * MIB)
    receive_maximum: Annotated[
        int, setting("Messages of QoS 1 and 2 that a client may send without an acknowledgement.", ge=1, le=65535)
    ] = 1024
    in_flight_max: Annotated[
        int,
        setting("Messages of QoS 1 and 2 that are sent to a client without its acknowledgement.", ge=1, le=65535),
    ] = 1024
    topic_aliases_max: Annotated[
        int, setting("Topic aliases per connection in each direction; 0 turns them off.", ge=0, le=65535)
    ] = 64
    keep_alive_s_max: Annotated[
        int, setting("Maximum keep alive of MQTT 5.0 clients in seconds; 0: no limit.", ge=0, le=65535)
    ] = 0
    session_expiry_s_max: Annotated[
        int,
        setting("Maximum time that a session is kept after its client disconnects, in seconds.", ge=0, le=0xFFFF_FFFF),
    ] = 0xFFFF_FFFF
    offline_messages_max: Annotated[
        int,
        setting("Messages kept for a session; at the limit the oldest ones are dropped. 0: no limit.", ge=0),
    ] = 0
    subscriptions_max: Annotated[int, setting("Maximum subscriptions per session.", ge=1)] = 10_000
    packets_per_s_max: Annotated[
        int,
        setting("Packets per second and connection; further ones are read in the next second. 0: no limit.", ge=0),
    ] = 0


class MqttsListener(Section, frozen=True):
    """The listener for MQTT over TLS. It requires `tls.certificate` and `tls.key`."""

    enabled: Enabled = False
    host: Host = ""
    port: Port = 8883


class MqttWebListener(Section, frozen=True):
    """The listener for MQTT over WebSocket at /mqtt, for pages in a browser."""

    enabled: Enabled = True
    host: Host = ""
    port: Port = 8083
    tls: UseTls = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        setting(
            "Additional hosts of pages that may connect, with or without a port. Pages of the broker's own names are "
            "always accepted.",
            reload=Reload.LIVE,
        ),
    ] = ()


class RocketmqListener(Section, frozen=True):
    """The RocketMQ 5 listener (gRPC), plaintext and TLS on one port. TLS uses the certificate of `tls`."""

    enabled: Enabled = True
    host: Host = ""
    port: Port = 8081
    vhost: Annotated[str, setting("The virtual host whose topics are served.")] = "/"
    access: LoginAccess = "loopback"
    auto_create: Annotated[bool, setting("Create topics and subscription groups when a client first uses them.")] = True
    partitions: Annotated[int, setting("Number of queues of topics created on first use.", ge=1, le=10_000)] = 1
    durability: Annotated[
        Literal["written", "synced"],
        setting(
            "What a send to a topic created on first use waits for: `written`, the write call, or `synced`, the fsync."
        ),
    ] = "synced"
    body_bytes_max: Annotated[ByteCount, setting("Maximum size of a message body.")] = ByteCount(4 * MIB)
    delay_ms_max: Annotated[
        int, setting("Maximum delay of a DELAY message, in milliseconds.", ge=1_000, le=3_456_000_000)
    ] = 3_456_000_000
    invisible_ms_min: Annotated[
        int, setting("Minimum invisible duration of received messages, in milliseconds.", ge=100)
    ] = 10_000
    transaction_check_ms: Annotated[
        int,
        setting("Age in milliseconds of an undecided transaction when the broker first asks its producer.", ge=100),
    ] = 6_000


class Tls(Section, frozen=True):
    """Certificates. SIGHUP reloads the files for new connections."""

    certificate: Annotated[
        Path | None, setting("PEM file with the server's certificate and its chain.", reload=Reload.LIVE)
    ] = None
    key: Annotated[
        Path | None, setting("PEM file with the certificate's private key, without a password.", reload=Reload.LIVE)
    ] = None
    authority: Annotated[
        Path | None, setting("PEM file with the CA certificates that sign client certificates.", reload=Reload.LIVE)
    ] = None
    clients: Annotated[
        Literal["ignore", "ask", "require"],
        setting(
            "Client certificates: `ignore` requests none, `ask` verifies one if sent, `require` demands one.",
            reload=Reload.LIVE,
        ),
    ] = "ignore"
    version_min: Annotated[Literal["1.2", "1.3"], setting("Minimum TLS version.", reload=Reload.LIVE)] = "1.2"


class Limits(Section, frozen=True):
    """Limits for clients."""

    connections_max: Annotated[int, setting("Maximum concurrent connections of all protocols but HTTP.", ge=1)] = 10_000
    channels_max: Annotated[int, setting("Maximum channels per AMQP connection.", ge=1, le=65535)] = 2047
    frame_bytes_max: Annotated[
        int, setting("Maximum AMQP frame size in bytes, offered in the handshake.", ge=4096, le=1 << 27)
    ] = 131_072
    message_bytes_max: Annotated[ByteCount, setting("Maximum message body size.")] = ByteCount(16 * MIB)
    heartbeat_s: Annotated[
        int, setting("AMQP heartbeat timeout in seconds, offered in the handshake; 0 disables it.", ge=0, le=65535)
    ] = 60
    handshake_timeout_ms: Annotated[
        int, setting("Maximum time from accepting a client to its open connection, in milliseconds.", ge=1)
    ] = 10_000


class Memory(Section, frozen=True):
    """Memory budgets, and the limit above which publishers are blocked. Consumers are never blocked."""

    high_watermark: Annotated[
        Share,
        setting(
            "Resident memory above which publishers are blocked: a size, or a percentage of the machine's or the "
            "container's memory.",
            reload=Reload.LIVE,
        ),
    ] = Share(percent=60.0)
    cache_bytes: Annotated[ByteCount, setting("Block cache size, shared by all stores.")] = ByteCount(64 * MIB)
    write_buffer_bytes: Annotated[ByteCount, setting("Write buffer size, shared by all stores.")] = ByteCount(128 * MIB)


class Disk(Section, frozen=True):
    """Disk space limits at which publishers are blocked."""

    free_min: Annotated[
        Share,
        setting(
            "Free disk space below which publishers are blocked: a size, or a percentage of the file system.",
            reload=Reload.LIVE,
        ),
    ] = Share(size_bytes=ByteCount(512 * MIB))
    vhost_max: Annotated[
        ByteCount,
        setting("Store size of a virtual host above which its publishers are blocked until it shrinks; 0: no limit."),
    ] = ByteCount(0)
    reserve: Annotated[
        ByteCount,
        setting(
            "Size of a preallocated file that is deleted when the disk is full, so that consumers can drain; 0: none."
        ),
    ] = ByteCount(64 * MIB)


class Vhosts(Section, frozen=True):
    """Supervision of virtual hosts."""

    on_failure: Annotated[
        Literal["continue", "stop_node"],
        setting(
            "What happens when a virtual host stays down after its restarts: `continue` serves the others, "
            "`stop_node` stops the broker."
        ),
    ] = "continue"
    restarts_max: Annotated[int, setting("Maximum restarts of a virtual host within the window.", ge=0)] = 3
    restart_window_s: Annotated[int, setting("Window in which restarts are counted, in seconds.", ge=1)] = 300


class Auth(Section, frozen=True):
    """Authentication. A broker that starts with an empty data directory creates the default user."""

    default_user: Annotated[str, setting("Name of the first user, an administrator; if empty, none is created.")] = (
        "guest"
    )
    default_password: Annotated[str, setting("Password of the first user.", secret=True)] = "guest"  # noqa: S105
    loopback_users: Annotated[
        tuple[str, ...], setting("Users that may connect only from this machine.", reload=Reload.LIVE)
    ] = ("guest",)
    anonymous_user: Annotated[
        str,
        setting(
            "User of local Kafka, MQTT and gRPC clients without credentials. They get its permissions but not its "
            "tags; if empty, they are refused.",
            reload=Reload.LIVE,
        ),
    ] = "guest"


class Events(Section, frozen=True):
    """Events of queue messages, recorded in the topic `__events` of their virtual host (docs/PIPELINE.md)."""

    sample: Annotated[
        float,
        setting(
            "Fraction of messages whose events are recorded, 0 to 1; 0 records none and costs nothing.", ge=0, le=1
        ),
    ] = 0.0


class Log(Section, frozen=True):
    """The log, written to stderr."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], setting("Minimum level of log lines.", reload=Reload.LIVE)
    ] = "info"
    format: Annotated[
        Literal["text", "json"],
        setting("Log format: `text`, or `json` with one object per line.", reload=Reload.LIVE),
    ] = "text"


class Stop(Section, frozen=True):
    """Shutdown of the broker."""

    grace_ms: Annotated[
        int,
        setting(
            "Time for confirms and clients to finish at shutdown, in milliseconds; then connections are closed.",
            ge=0,
            reload=Reload.LIVE,
        ),
    ] = 10_000


class Config(Section, frozen=True):
    """All settings."""

    data_dir: Annotated[Path, setting("Directory for all data.")] = Path("data")
    host: Annotated[
        str,
        setting(
            "Address of listeners without their own: 127.0.0.1 for this machine only, 0.0.0.0 or :: for all interfaces."
        ),
    ] = "127.0.0.1"
    node_name: Annotated[str, setting("Name of the broker; if empty, basalt@ followed by the machine's name.")] = ""
    load_definitions: Annotated[
        Path | None,
        setting("File of definitions (RabbitMQ's or Basalt's), imported at every start before clients can connect."),
    ] = None
    amqp: AmqpListener = AmqpListener()
    amqps: AmqpsListener = AmqpsListener()
    admin: AdminListener = AdminListener()
    fila: FilaListener = FilaListener()
    kafka: KafkaListener = KafkaListener()
    mqtt: MqttListener = MqttListener()
    mqtts: MqttsListener = MqttsListener()
    mqtt_ws: MqttWebListener = MqttWebListener()
    rocketmq: RocketmqListener = RocketmqListener()
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
        """Raise InvalidConfigError for settings that conflict."""
        asked = {
            "amqps.enabled": self.amqps.enabled,
            "admin.tls": self.admin.enabled and self.admin.tls,
            "fila.tls": self.fila.enabled and self.fila.tls,
            "kafka.tls": self.kafka.enabled and self.kafka.tls,
            "mqtts.enabled": self.mqtts.enabled,
            "mqtt_ws.tls": self.mqtt_ws.enabled and self.mqtt_ws.tls,
        }
        needs_tls = [name for name, asks in asked.items() if asks]
        if needs_tls and (self.tls.certificate is None or self.tls.key is None):
            raise InvalidConfigError(
                f"{needs_tls[0]} needs tls.certificate and tls.key: set both PEM files, or set {needs_tls[0]} = false"
            )
        if self.tls.clients != "ignore" and self.tls.authority is None:
            raise InvalidConfigError(
                f'tls.clients = "{self.tls.clients}" needs tls.authority: the PEM file of the CA for clients'
            )
        taken: dict[tuple[str, int], str] = {}
        for name, host, port in self.endpoints():
            other = taken.setdefault((host, port), name)
            if port and other != name:
                raise InvalidConfigError(
                    f"{other}.port and {name}.port are both {port} on {host}; set a different port for each"
                )

    def endpoints(self) -> list[tuple[str, str, int]]:
        """Return (section, address, port) of every enabled listener."""
        sections: list[tuple[str, Any]] = [
            ("amqp", self.amqp),
            ("amqps", self.amqps),
            ("admin", self.admin),
            ("fila", self.fila),
            ("kafka", self.kafka),
            ("mqtt", self.mqtt),
            ("mqtts", self.mqtts),
            ("mqtt_ws", self.mqtt_ws),
            ("rocketmq", self.rocketmq),
        ]
        return [(name, each.host or self.host, each.port) for name, each in sections if each.enabled]

    @property
    def name(self) -> str:
        return self.node_name or f"basalt@{os.uname().nodename}"


class Leaf(msgspec.Struct, frozen=True):
    """One setting, with its names in the sources."""

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
    """Return every setting, in the order of the tree."""
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
    """Return the value of a setting."""
    value: Any = config
    for name in leaf.path:
        value = getattr(value, name)
    return value
