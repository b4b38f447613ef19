"""Killable child processes: a fork server, the fault shim, and simulated power loss.

Usage:

    @pytest.fixture(scope="module")
    def forge(tmp_path_factory):                      # one interpreter, forked per child: no import cost per round
        with Forge(compile_shim(tmp_path_factory)) as forge:
            yield forge

    child = forge.start("tests.crash.workload:run", str(path), seed, shim=Shim(root=path, ...))
    for line in child.lines(timeout_s=20): ...        # what the child emitted, until it ends
    child.kill()                                      # SIGKILL; returns when the process is gone and its locks with it

A child's function is `def run(emit: Emit, *args) -> None`. `emit(text)` passes one line to the parent before it
returns, so all lines emitted before a kill are known. The last line is `END`, or `ERROR` and a traceback. The fork
server never opens a store, so a fork never copies its threads.

Faults: give the child a `Shim` and write rules to its control file (see shim.c): `shim.fail("write,pwrite", "*.log",
errno.ENOSPC)`, and `shim.heal()`. They count from the moment the file appears.

Power loss: `PowerLoss(root)` before the child starts considers all files durable. After the kill, `play(target)` builds
the content of a disk that keeps only synced data. Files have their last synced length, and unsynced overwrites are
undone. Names are those of the last sync of their directory; unsynced removals are undone. `Tails` defines what the disk
shows beyond the synced length and of overwrites.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeAlias

Emit: TypeAlias = Callable[[str], None]

END: Final = "END"
ERROR: Final = "ERROR"
GONE_WAIT_S: Final = 30.0
"""Maximum time of a killed process to end. Beyond it, the process hangs in the kernel."""

SECTOR_BYTES: Final = 512
"""Bytes that a disk writes atomically."""

_SOURCE: Final = Path(__file__).with_name("shim.c")
_REPO: Final = Path(__file__).parents[2]
_REQUEST_BYTES_MAX: Final = 60_000


def compile_shim(folder: Path) -> Path:
    """Compile the shim into `folder`."""
    library = folder / "shim.so"
    if not library.exists():
        draft = folder / f"shim.{os.getpid()}.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(draft), str(_SOURCE), "-ldl"], check=True)
        draft.rename(library)
    return library


@dataclass(frozen=True, slots=True)
class Shim:
    """Settings of the shim in one child: files below `root` fail by the rules of the control file and are recorded."""

    root: Path
    control: Path
    record: Path | None = None
    removed: Path | None = None

    @classmethod
    def beside(cls, root: Path) -> Shim:
        """Return a shim for faults only, with a control file next to `root`."""
        return cls(root, root.with_name(root.name + ".control"))

    def fail(self, ops: str, pattern: str, code: int, *, skip: int = 0, half: bool = False) -> None:
        """Let the calls `ops` (comma-separated) on files that match `pattern` fail, after `skip` successful ones."""
        self.rule(f"{ops} {pattern} {code} {skip} {'half' if half else 'all'}")

    def rule(self, *lines: str) -> None:
        draft = self.control.with_name(self.control.name + ".new")
        draft.write_text("\n".join(lines) + "\n")
        draft.rename(self.control)

    def heal(self) -> None:
        self.control.unlink(missing_ok=True)


class Child:
    """A forked process and its output."""

    def __init__(self, pid: int, out: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._out = out
        self._rest = b""

    def lines(self, timeout_s: float) -> Iterator[str]:
        """Yield the lines of the child until it ends. Raises TimeoutError if it is silent for longer."""
        # Not `select`, which supports no file descriptor above 1023.
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        while True:
            if not poll.poll(timeout_s * 1000):
                self.kill()
                raise TimeoutError(f"child {self.pid} said nothing for {timeout_s} s")
            chunk = os.read(self._out, 1 << 16)
            if not chunk:
                # The kill truncated a last line without an end. It is ignored.
                return
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            yield from (line.decode() for line in whole)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process has ended and its locks are released."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.wait_gone()

    def wait_gone(self) -> None:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(GONE_WAIT_S * 1000):
            raise TimeoutError(f"child {self.pid} is not gone after {GONE_WAIT_S} s")

    def finish(self, timeout_s: float = 60.0) -> list[str]:
        """Return all lines. Raises AssertionError with the traceback if the child failed."""
        said = list(self.lines(timeout_s))
        self.wait_gone()
        self.close()
        assert said, f"child {self.pid} ended without output"
        assert said[-1] == END, "\n".join(said[-60:])
        return said[:-1]

    def close(self) -> None:
        os.close(self._pidfd)
        os.close(self._out)


def deaths(
    rng: random.Random, count: int, early: float, *, until: Callable[[], object] = lambda: True
) -> Iterator[bool]:
    """Yield for each of `count` children whether it is killed during its open: a share `early`, at random places.

    The share is fixed, so that enough children open with any seed. With `until`, up to `count` more children follow
    until it returns True: on a slow machine the kills may come before enough work.
    """
    plan = [number < round(count * early) for number in range(count)]
    rng.shuffle(plan)
    yield from plan
    for _ in range(count):
        if until():
            return
        yield False


def listen_and_kill(
    child: Child, receive_line: Callable[[str], None], rng: random.Random, *, early: bool, early_s: float, late_s: float
) -> None:
    """Read the lines of a child, which reports "opened", and kill it at a random time.

    If `early`, within `early_s` of its start, while it opens; else within `late_s` of "opened".
    """
    killer = threading.Timer(rng.random() * (early_s if early else late_s), child.kill)
    if early:
        killer.start()
    said: list[str] = []
    try:
        for line in child.lines(timeout_s=60):
            if said or line == ERROR:
                said.append(line)
                continue
            receive_line(line)
            if line == "opened" and not early:
                killer.start()
    finally:
        if killer.ident is not None:
            killer.join()
        child.kill()
        child.close()
    assert not said, "\n".join(said)


class Forge:
    """A process that imports all modules once and forks a child per request."""

    def __init__(self, shim: Path | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join([str(_REPO / "src"), str(_REPO)])
        if shim is not None:
            environment["LD_PRELOAD"] = str(shim)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.harness", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=_REPO,
        )
        theirs.close()
        self._socket = ours
        self._socket.settimeout(60)

    def start(self, function: str, *args: str | int, shim: Shim | None = None) -> Child:
        """Run `module:function` with `args` in a child."""
        reading, writing = os.pipe()
        request = {
            "function": function,
            "args": args,
            "shim": None if shim is None else [str(part or "") for part in _parts(shim)],
        }
        raw = json.dumps(request).encode()
        assert len(raw) < _REQUEST_BYTES_MAX, "pass large arguments in a file"
        socket.send_fds(self._socket, [raw], [writing])
        os.close(writing)
        answer = self._socket.recv(64)
        assert answer, "the fork server has ended"
        return Child(int(answer), reading)

    def run(self, function: str, *args: str | int, shim: Shim | None = None, timeout_s: float = 60.0) -> list[str]:
        """Run a function in a child to its end. Return its lines."""
        return self.start(function, *args, shim=shim).finish(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._server.wait(30)


def _parts(shim: Shim) -> tuple[Path | None, ...]:
    return (shim.root, shim.control, shim.record, shim.removed)


def serve(fd: int) -> None:
    """Loop of the fork server: receive a request and a pipe, return a pid."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    link = socket.socket(fileno=fd)
    while True:
        raw, fds, _, _ = socket.recv_fds(link, _REQUEST_BYTES_MAX, 1)
        if not raw:
            return
        request = json.loads(raw)
        with contextlib.suppress(Exception):
            # Import once for all children. The child reports errors.
            importlib.import_module(request["function"].partition(":")[0])
        pid = os.fork()
        if pid == 0:
            link.close()
            _be_child(request, fds[0])
        os.close(fds[0])
        link.send(str(pid).encode())
        # The child stays a zombie until the parent has opened a pidfd.
        _reap(but=pid)


def _reap(but: int) -> None:
    """Reap ended children, except the latest, which the parent may not know yet."""
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None or info.si_pid == but:
            return
        os.waitpid(info.si_pid, 0)


def _be_child(request: dict[str, object], out: int) -> None:
    lock = threading.Lock()

    def emit(text: str) -> None:
        data = text.encode() + b"\n"
        with lock:
            while data:
                data = data[os.write(out, data) :]

    code = 0
    try:
        shim = request["shim"]
        if isinstance(shim, list):
            ctypes.CDLL(None).shim_configure(*(part.encode() for part in shim))
        module, _, name = str(request["function"]).partition(":")
        args = request["args"]
        assert isinstance(args, list)
        getattr(importlib.import_module(module), name)(emit, *args)
        emit(END)
    except BaseException:
        code = 1
        for line in (ERROR, *traceback.format_exc().splitlines()):
            emit(line)
    finally:
        os._exit(code)


class Tails(enum.Enum):
    """Content of a log after its synced bytes, after a power loss."""

    CUT = "nothing"
    TORN = "some of what was written"
    GARBAGE = "noise"
    ZEROS = "zeros"


class PowerLoss:
    """Tracks the durable data below `root`, starting with a durable state."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root = root
        self._scratch = scratch
        scratch.mkdir(parents=True)
        (scratch / "removed").mkdir()
        self._names: dict[str, dict[str, int | None]] = {}
        self._synced: dict[int, int] = {}
        self._written: dict[int, tuple[int, int, int, int]] = {}
        """Unsynced overwrites by number: file, position, length, and position of the old bytes."""
        self._names[str(root.parent)] = {}
        for folder, folders, files in os.walk(root):
            names = self._names.setdefault(folder, {})
            names.update(dict.fromkeys(folders))
            for name in files:
                status = os.stat(os.path.join(folder, name))
                names[name] = status.st_ino
                self._synced[status.st_ino] = status.st_size
        if root.exists():
            self._names[str(root.parent)][root.name] = None
        self._durable = {folder: dict(names) for folder, names in self._names.items()}
        self._kept = b""

    def shim(self) -> Shim:
        return Shim(self.root, self._scratch / "control", self._scratch / "record", self._scratch / "removed")

    def play(self, target: Path, tails: Tails, rng: random.Random) -> None:
        """Build at `target` the durable content of `root`."""
        record = self._scratch / "record"
        if record.exists():
            for line in record.read_text().splitlines():
                self._follow(line)
            self._kept = record.with_name("record.undo").read_bytes()
        bodies = {int(path.name): path for path in (self._scratch / "removed").iterdir()}
        for folder, _, files in os.walk(self.root):
            for name in files:
                path = Path(folder, name)
                bodies[path.stat().st_ino] = path
        target.mkdir()
        self._build(str(self.root), target, bodies, tails, rng)

    def _follow(self, line: str) -> None:
        kind, *rest = line.split(" ")
        if kind == "S":
            ino, size, before = map(int, rest)
            # Two threads may sync a file at once. The one that began first, with the smaller size, may end last.
            self._synced[ino] = max(self._synced.get(ino, 0), size)
            for number in [each for each, write in self._written.items() if write[0] == ino and each < before]:
                del self._written[number]
        elif kind == "W":
            number, ino, at, size, kept_at = map(int, rest)
            self._written[number] = (ino, at, size, kept_at)
        elif kind == "Y":
            del self._written[int(rest[0])]
        elif kind == "T":
            ino, size = int(rest[0]), int(rest[1])
            self._synced[ino] = min(self._synced.get(ino, 0), size)
        elif kind == "D":
            self._durable[rest[0]] = dict(self._names.get(rest[0], {}))
        elif kind == "M":
            self._put(rest[0], None)
            self._names.setdefault(rest[0], {})
        elif kind == "N" or kind == "L":
            self._put(rest[1], int(rest[0]))
        elif kind == "U":
            folder, name = os.path.split(rest[1])
            self._names.get(folder, {}).pop(name, None)
        else:
            assert kind == "R", line
            folder, name = os.path.split(rest[1])
            moved = self._names.get(folder, {}).pop(name, None)
            self._put(rest[2], moved)
            if moved is None:
                self._move_folder(rest[1], rest[2])

    def _move_folder(self, old: str, new: str) -> None:
        for table in (self._names, self._durable):
            for folder in [each for each in table if each == old or each.startswith(old + "/")]:
                table[new + folder.removeprefix(old)] = table.pop(folder)

    def _put(self, path: str, what: int | None) -> None:
        folder, name = os.path.split(path)
        self._names.setdefault(folder, {})[name] = what

    def _build(self, folder: str, target: Path, bodies: dict[int, Path], tails: Tails, rng: random.Random) -> None:
        names = self._durable.get(folder, {})
        files = {name: self._take_back(ino, bodies[ino], tails, rng) for name, ino in names.items() if ino is not None}
        synced = {name: self._synced.get(ino, 0) for name, ino in names.items() if ino is not None}
        torn = _choose_torn(files, synced, rng)
        for name in names.keys() - files.keys():
            (target / name).mkdir()
            self._build(os.path.join(folder, name), target / name, bodies, tails, rng)
        for name, body in files.items():
            unsynced = body[synced[name] :]
            tail = b""
            if name.endswith(".log") and tails is not Tails.CUT and name <= torn:
                tail = _tail(unsynced, tails, rng) if name == torn else unsynced
            (target / name).write_bytes(body[: synced[name]] + tail)

    def _take_back(self, ino: int, path: Path, tails: Tails, rng: random.Random) -> bytes:
        """Return the content of a file without unsynced overwrites, or with some of their sectors."""
        body = bytearray(path.read_bytes())
        for number in sorted(self._written, reverse=True):
            its, at, size, kept_at = self._written[number]
            if its != ino:
                continue
            for begin in range(0, size, SECTOR_BYTES):
                if tails is Tails.CUT or rng.random() < 0.5:
                    end = min(begin + SECTOR_BYTES, size)
                    body[at + begin : at + end] = self._kept[kept_at + begin : kept_at + end]
        return bytes(body)


def _choose_torn(files: dict[str, bytes], synced: dict[str, int], rng: random.Random) -> str:
    """Return the log that the disk was writing at the power loss. Earlier logs are complete; later ones have no tail.

    Only logs have a tail, because every other file is synced before anything refers to it.
    """
    logs = sorted(name for name in files if name.endswith(".log"))
    return rng.choice([name for name in logs if synced[name] < len(files[name])] or logs[-1:] or [""])


def _tail(unsynced: bytes, tails: Tails, rng: random.Random) -> bytes:
    shown = unsynced[: rng.randint(0, len(unsynced))]
    if tails is Tails.ZEROS:
        return shown + bytes(rng.randint(0, 70_000))
    if tails is Tails.GARBAGE:
        return shown + rng.randbytes(rng.randint(0, 70_000))
    return shown


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def pause(seconds: float) -> None:
    """Wait for a random time, to kill the child at a random point."""
    time.sleep(seconds)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
