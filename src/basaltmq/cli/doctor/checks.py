"""The checks of `basalt doctor`. Each yields what it found and a remedy.

A check changes nothing, except for a small temporary file in the data directory that measures the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import enum
import errno
import fcntl
import importlib.metadata
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from basaltmq.broker.auth.tls import expires_at_s
from basaltmq.broker.config.settings import Config
from basaltmq.broker.config.sizes import MIB, ByteCount
from basaltmq.broker.resources.memory_limit import memory_bytes
from basaltmq.broker.vhost_directory import VHostDirectories
from basaltmq.cli.server.sockets import files_needed
from basaltmq.errors import BasaltError, install_hint
from basaltmq.store.directory import LOCK

DAY_S: Final = 86_400
EXPIRY_WARN_DAYS: Final = 21
"""Below the 30 days at which automatic renewals begin."""


FSYNCS: Final = 10
FSYNC_SLOW_MS: Final = 20.0
CLOCK_MIN_S: Final = 1_735_689_600
"""2025-01-01. A clock before this date was never set."""

CLOCK_NOT_SYNCED: Final = 5
"""TIME_ERROR of adjtimex(2)."""

LISTEN: Final = "0A"
"""TCP_LISTEN in /proc/net/tcp."""

UNSUITABLE_SYSTEMS: Final = {
    **dict.fromkeys(
        ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs"),
        "use a local disk: file locks and fsync may not work there",
    ),
    **dict.fromkeys(("tmpfs", "ramfs"), "use a disk: data there does not survive a restart"),
}
"""File system -> advice."""

REQUIRED: Final = ("rocksdict", "msgspec", "google-crc32c", "click", "sortedcontainers", "h11")
OPTIONAL: Final = {
    "uvloop": ("server", "a faster event loop"),
    "hpack": ("server", "gRPC (fila.enabled)"),
    "lupa": ("lua", "Lua hooks"),
    "pyarrow": ("arrow", "Arrow columns, and decoding of lz4, snappy and zstd batches"),
}
"""Package -> the extra that installs it, and what needs it."""


class State(enum.StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


class Finding(NamedTuple):
    check: str
    state: State
    detail: str
    advice: str = ""


def python(_config: Config) -> Iterator[Finding]:
    yield Finding("python", State.OK, f"{'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}")


def packages(config: Config) -> Iterator[Finding]:
    found: list[str] = []
    for name in (*REQUIRED, *OPTIONAL):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            needed = name in REQUIRED or (name == "hpack" and config.fila.enabled)
            state = State.FAIL if needed else State.WARN
            extra, purpose = OPTIONAL.get(name, ("server", "required"))
            yield Finding("packages", state, f"{name} is missing", f"{purpose}: {install_hint(extra)}")
    yield Finding("packages", State.OK, ", ".join(found))


def holder_of(store: Path) -> str | None:
    """Return the id of the process that has a store open for writing, or None."""
    try:
        with open(store / LOCK, "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read(64).decode("ascii", "replace").strip() or "unknown"
    except OSError:
        return None
    return None


def ports(config: Config) -> Iterator[Finding]:
    holder = holder_of(VHostDirectories(config.data_dir).node_store)
    for name, host, port in config.endpoints():
        if port == 0:
            continue
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE and holder is not None and _listens(holder, port):
                    yield Finding(
                        "ports", State.OK, f"{name} {host}:{port} is used by the running broker, process {holder}"
                    )
                    continue
                advice = f"stop the process that uses it (ss -ltnp 'sport = :{port}'), or set {name}.port"
                yield Finding("ports", State.WARN, f"{name} {host}:{port}: {error.strerror}", advice)
            else:
                yield Finding("ports", State.OK, f"{name} {host}:{port} is free")


def _listens(process: str, port: int) -> bool:
    """Whether a process listens on a port, as far as this user may see."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process}/fd/{descriptor}") in inodes:
                    return True
    return False


def files(config: Config) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_needed(config)
    allowed = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if allowed < needed:
        yield Finding(
            "open files",
            State.WARN,
            f"{soft:,} (at most {allowed:,}), but limits.connections_max needs {needed:,}",
            f"ulimit -n {needed}, or LimitNOFILE={needed} in the unit, or a smaller limits.connections_max",
        )
    else:
        yield Finding("open files", State.OK, f"{soft:,}, raised at start to {needed:,}")


def memory(config: Config) -> Iterator[Finding]:
    total = memory_bytes()
    mark = config.memory.high_watermark.of(total)
    fixed = int(config.memory.cache_bytes + config.memory.write_buffer_bytes)
    detail = f"{_size(total)}; publishers are blocked above {_size(mark)}"
    if mark < fixed + 128 * MIB:
        advice = "raise memory.high_watermark, or reduce memory.cache_bytes and memory.write_buffer_bytes"
        yield Finding("memory", State.WARN, f"{detail}, of which {_size(fixed)} are cache and buffers", advice)
    else:
        yield Finding("memory", State.OK, detail)


def disk(config: Config) -> Iterator[Finding]:
    place = _existing(config.data_dir)
    usage = shutil.disk_usage(place)
    free_min = config.disk.free_min.of(usage.total)
    detail = f"{_size(usage.free)} of {_size(usage.total)} free at {place}"
    if usage.free < 4 * free_min:
        state = State.FAIL if usage.free < free_min else State.WARN
        advice = f"free disk space: publishers are blocked below {_size(free_min)} (disk.free_min)"
        yield Finding("disk", state, detail, advice)
    else:
        yield Finding("disk", State.OK, detail)
    system = _file_system(place)
    if system in UNSUITABLE_SYSTEMS:
        yield Finding("disk", State.WARN, f"{place} is on {system}", UNSUITABLE_SYSTEMS[system])


def fsync_latency(config: Config) -> Iterator[Finding]:
    """Measure the fsync latency: every confirm waits for an fsync."""
    place = _existing(config.data_dir)
    try:
        with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=place) as file:
            took_ms = []
            for _ in range(FSYNCS):
                began = time.perf_counter()
                os.write(file.fileno(), bytes(4096))
                os.fdatasync(file.fileno())
                took_ms.append((time.perf_counter() - began) * 1000)
    except OSError as error:
        advice = f"give the broker's user access to the directory with chown or chmod {place}, or set data_dir"
        yield Finding("disk", State.FAIL, f"{place} is not writable: {error.strerror}", advice)
        return
    median = sorted(took_ms)[FSYNCS // 2]
    state = State.WARN if median > FSYNC_SLOW_MS else State.OK
    advice = "use a faster disk: every confirm waits for an fsync" if state is State.WARN else ""
    yield Finding("disk", state, f"an fsync takes {median:.2f} ms", advice)


def clock(_config: Config) -> Iterator[Finding]:
    if time.time() < CLOCK_MIN_S:
        yield Finding("clock", State.FAIL, time.strftime("%Y-%m-%d"), "set the clock: message timestamps use it")
        return
    synced = _clock_is_synced()
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    if synced is False:
        yield Finding("clock", State.WARN, f"{now}, not synchronized by NTP", "enable chrony or systemd-timesyncd")
    else:
        yield Finding("clock", State.OK, now + (", synchronized by NTP" if synced else ""))


def certificates(config: Config) -> Iterator[Finding]:
    if config.tls.certificate is None:
        yield Finding("tls", State.OK, "not used")
        return
    try:
        left_days = (expires_at_s(config.tls) - time.time()) / DAY_S
    except BasaltError as error:
        yield Finding("tls", State.FAIL, str(error), "renew or replace the certificate, then: systemctl reload basalt")
        return
    state = State.WARN if left_days < EXPIRY_WARN_DAYS else State.OK
    advice = "renew the certificate, then: systemctl reload basalt (or kill -HUP)" if state is State.WARN else ""
    yield Finding("tls", state, f"{config.tls.certificate} expires in {left_days:.0f} days", advice)


CHECKS: Final[tuple[Callable[[Config], Iterator[Finding]], ...]] = (
    python,
    packages,
    ports,
    files,
    memory,
    disk,
    fsync_latency,
    clock,
    certificates,
)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _file_system(path: Path) -> str:
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    where = str(path.resolve())
    for line in lines:
        parts = line.split(" ")
        mount = parts[1].replace("\\040", " ")
        if (where + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind = mount, parts[2]
    return kind


def _clock_is_synced() -> bool | None:
    """Whether the kernel's clock is synchronized. None if unknown."""
    try:
        library = ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6")
        answer = library.adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    return None if answer < 0 else answer != CLOCK_NOT_SYNCED


def _size(count: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        whole = ByteCount.parse(f"1{unit}")
        if count >= whole:
            return f"{count / whole:,.1f} {unit}"
    return f"{count} bytes"
