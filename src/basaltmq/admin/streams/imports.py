"""Routes for bulk imports: clients upload parts, then commit a batch of a run exactly once.

    PUT part, PUT part, ...   staged files beside the store, validated record by record on arrival
    POST the batch            imported exactly once, even if the request is repeated (`streams/imports/imports.py`)

Both requests are idempotent: a repeated commit finds the batch already imported. Parts that are not committed are
removed after a day. A part requires `write` on every topic that it has records for. A run belongs to the user who
commits its first batch, because another user could skip or repeat batches. Administrators may use every run.
"""

from __future__ import annotations

import asyncio
import zlib
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final
from uuid import uuid4
from weakref import WeakKeyDictionary

import msgspec

from basaltmq.admin.http.message import HttpError
from basaltmq.admin.http.routes import Access, Call, Route, allowed
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.streams.arrow_stream import require_arrow
from basaltmq.broker.auth.permissions import WRITE
from basaltmq.broker.guard import Guard
from basaltmq.broker.vhost import VHost
from basaltmq.clock import now_ms
from basaltmq.errors import AccessRefusedError, BasaltError, NotFoundError
from basaltmq.store.directory import make_directory, os_error, sync_directory, sync_file
from basaltmq.store.rocks import RocksStore

if TYPE_CHECKING:
    from basaltmq.streams.imports.imports import Imported, Run
    from basaltmq.streams.imports.stage import Part

PART_BYTES_MAX: Final = 256 << 20
"""Size limit of one part: several of the largest records. Clients send some 10 MiB at a time."""

PART_TYPES: Final = ("application/vnd.apache.arrow.file", "application/octet-stream")

PARTS_MAX: Final = 100_000
"""Parts per batch, which allows terabytes."""

GATHERED_BYTES: Final = 1 << 20
"""Bytes of a body that are buffered before a thread writes them."""

COMMIT_BYTES_MAX: Final = 32 << 20


class PutPart(msgspec.Struct):
    """A staged part."""

    file: str
    size_bytes: int
    crc: int
    """CRC-32 as in zlib."""


class BatchSpec(msgspec.Struct):
    """Body of a commit: the parts of the batch."""

    parts: list[PutPart]


class _File:
    """A part that is being uploaded."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self.path = folder / f"{name}.{uuid4().hex}.coming"
        self.name = name
        self.size_bytes = 0
        self.crc = 0
        self._some: list[bytes] = []
        self._waiting_bytes = 0
        self._file: IO[bytes] | None = None

    async def write(self, data: bytes) -> None:
        self._some.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= GATHERED_BYTES:
            await asyncio.to_thread(self._flush)

    async def discard(self) -> None:
        await asyncio.to_thread(self._discard)

    def finish(self) -> None:
        """Make the file durable under its temporary name."""
        self._flush()
        assert self._file is not None, "the flush has opened it"
        self._file.close()
        sync_file(self.path)

    def keep(self) -> PutPart:
        self.path.rename(self._folder / self.name)
        sync_directory(self._folder)
        return PutPart(self.name, self.size_bytes, self.crc)

    def _flush(self) -> None:
        raw = b"".join(self._some)
        self._some, self._waiting_bytes = [], 0
        try:
            if self._file is None:
                make_directory(self._folder)
                self._file = open(self.path, "wb")  # noqa: SIM115
            self._file.write(raw)
        except OSError as error:
            raise os_error(error, self.path) from error
        self.size_bytes += len(raw)
        self.crc = zlib.crc32(raw, self.crc)

    def _discard(self) -> None:
        if self._file is not None:
            self._file.close()
            self.path.unlink(missing_ok=True)


class StreamImports:
    """Handlers of /api/imports."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._turns: WeakKeyDictionary[VHost, asyncio.Lock] = WeakKeyDictionary()

    def routes(self) -> list[Route]:
        run = "/api/imports/{vhost}/{run}"
        batch = run + "/{batch}"
        return [
            Route("GET", run, self.one, "Progress of an import run.",
                  returns="last_batch: the last imported batch, -1 if none; pending: a batch cut off by a crash."),
            Route("PUT", batch + "/{file}", self.put, "Stage a part: an Arrow IPC file.", sink=self.incoming,
                  body_bytes_max=PART_BYTES_MAX, content_types=PART_TYPES,
                  returns="file, size_bytes and crc, for the commit. The file is named part-NNNNN-HEX32.arrow. Its "
                          "schema has key, value, headers, timestamp, and metadata basalt.chunks, JSON: [[topic, "
                          "partition, records], ...], one item per record batch."),
            Route("POST", batch, self.commit, "Import the staged parts, exactly once per run and batch.",
                  takes=BatchSpec, body_bytes_max=COMMIT_BYTES_MAX,
                  returns="records; was_done if the batch was already imported. Batches of a run must ascend."),
            Route("DELETE", batch, self.discard, "Delete staged parts, unless they are being imported."),
            Route("DELETE", run, self.forget, "Forget a finished run, whose batches will not be sent again."),
        ]  # fmt: skip

    def incoming(self, call: Call) -> _File:
        require_arrow()
        from basaltmq.streams.imports.upload import NAME

        vhost = self._vhost(call)
        name = call.names["file"]
        if not NAME.fullmatch(name):
            raise HttpError(400, f"a part must be named part-NNNNN-HEX32.arrow, not {name[:80]!r}")
        return _File(self._folder(call, vhost), name)

    async def put(self, call: Call) -> Any:
        from basaltmq.streams.imports.upload import open_upload

        vhost, file = self._vhost(call), call.body
        with Guard(vhost):
            await asyncio.to_thread(file.finish)
            upload = await asyncio.to_thread(open_upload, file.path)
            limits = {}
            topics = vhost.streams.plane.topics
            for chunk in upload.chunks:
                if chunk.topic not in limits:
                    self._scope.check(call, vhost, WRITE, chunk.topic)
                    topic = await asyncio.to_thread(topics.get, chunk.topic)
                    limits[chunk.topic] = topic.config
                if chunk.partition >= limits[chunk.topic].partitions:
                    raise HttpError(400, f"topic {chunk.topic!r} has no partition {chunk.partition}")
            await asyncio.to_thread(upload.check, lambda name: limits[name].record_bytes_max)
            return await asyncio.to_thread(file.keep)

    async def commit(self, call: Call) -> Any:
        require_arrow()
        from basaltmq.streams.imports.imports import ONCE, Imports, read_run

        vhost = self._vhost(call)
        if len(call.body.parts) > PARTS_MAX:
            raise HttpError(413, f"{len(call.body.parts)} parts exceed the limit of {PARTS_MAX} per batch")
        run, batch, folder = call.names["run"], _batch(call), self._folder(call, vhost)
        if run.startswith(ONCE):
            raise HttpError(400, f"runs whose names start with {ONCE!r} are not remembered; rename {run!r}")
        parts = await asyncio.to_thread(_parts, folder, call.body.parts)
        names = {chunk.topic for part in parts for chunk in part.chunks}
        for name in names:
            self._scope.check(call, vhost, WRITE, name)

        def work() -> Imported:
            state = read_run(vhost.store, run)
            _check_owner(call, state)
            is_known = batch <= state.last_batch or (state.intent is not None and state.intent.batch == batch)
            gone = [part.file for part in parts if not part.chunks]
            if gone and not is_known:
                raise NotFoundError(f"part {gone[0]} of batch {batch} of run {run!r} is not staged; upload it again")
            return Imports(_store_path(vhost), vhost.store, vhost.streams.plane, now_ms).run(
                run, batch, parts, owner=call.who.name
            )

        async with self._turn(vhost):
            with Guard(vhost):
                done = await asyncio.to_thread(work)
        for name in names:
            vhost.streams.notify(name)
        return done

    async def one(self, call: Call) -> Any:
        require_arrow()
        from basaltmq.streams.imports.imports import read_run

        vhost = self._scope.vhost(call)
        with Guard(vhost):
            found = await asyncio.to_thread(read_run, vhost.store, call.names["run"])
        pending = None if found.intent is None else found.intent.batch
        return {"run": call.names["run"], "last_batch": found.last_batch, "pending": pending}

    async def discard(self, call: Call) -> None:
        require_arrow()
        from basaltmq.streams.imports import stage
        from basaltmq.streams.imports.imports import read_run

        vhost = self._scope.vhost_to_change(call)
        folder, batch = self._folder(call, vhost), _batch(call)

        def remove() -> None:
            state = read_run(vhost.store, call.names["run"])
            _check_owner(call, state)
            for topic in _staged_topics(folder):
                self._scope.check(call, vhost, WRITE, topic)
            intent = state.intent
            if intent is None or intent.batch != batch:
                stage.remove(folder)

        async with self._turn(vhost):
            with Guard(vhost):
                await asyncio.to_thread(remove)

    async def forget(self, call: Call) -> None:
        require_arrow()
        from basaltmq.streams.imports.imports import forget_run, read_run

        vhost = self._scope.vhost_to_change(call)

        def forget() -> None:
            _check_owner(call, read_run(vhost.store, call.names["run"]))
            forget_run(vhost.store, call.names["run"])

        async with self._turn(vhost):
            with Guard(vhost):
                await asyncio.to_thread(forget)

    def _vhost(self, call: Call) -> VHost:
        """Return the virtual host. Raise while its publishers are blocked."""
        vhost = self._scope.vhost(call)
        self._scope.node.permissions.check_vhost(call.who, vhost.name)
        self._scope.check_not_blocked(vhost)
        return vhost

    def _folder(self, call: Call, vhost: VHost) -> Path:
        from basaltmq.streams.imports.stage import folder_of

        return folder_of(_store_path(vhost), call.names["run"], _batch(call))

    def _turn(self, vhost: VHost) -> asyncio.Lock:
        return self._turns.setdefault(vhost, asyncio.Lock())


def _store_path(vhost: VHost) -> Path:
    if not isinstance(vhost.store, RocksStore):
        raise HttpError(400, f"vhost {vhost.name!r} is in memory and cannot import")
    return vhost.store.path


def _batch(call: Call) -> int:
    text = call.names["batch"]
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise HttpError(400, f"the batch must be a non-negative integer, not {text[:40]!r}")
    return int(text)


def _check_owner(call: Call, state: Run) -> None:
    """Raise AccessRefusedError unless the user owns the run, it has no owner, or the user is an administrator."""
    if state.owner not in {"", call.who.name} and not allowed(call.who.tags, Access.ADMINISTRATOR):
        raise AccessRefusedError(
            f"run {call.names['run']!r} belongs to user {state.owner!r}; only this user or an administrator may use it"
        )


def _staged_topics(folder: Path) -> set[str]:
    """Return the topics of all staged parts in a folder. Other files are ignored."""
    from basaltmq.streams.imports.upload import NAME, open_upload

    topics: set[str] = set()
    if folder.is_dir():
        for path in folder.iterdir():
            if NAME.fullmatch(path.name):
                with suppress(BasaltError):
                    topics |= {chunk.topic for chunk in open_upload(path).chunks}
    return topics


def _parts(folder: Path, put: list[PutPart]) -> list[Part]:
    """Return parts with the chunks of their files. Files of an imported batch are gone and not needed."""
    from basaltmq.streams.imports.stage import Part
    from basaltmq.streams.imports.upload import NAME, open_upload

    found = []
    for each in put:
        if not NAME.fullmatch(each.file):
            raise HttpError(400, f"{each.file[:80]!r} is not the name of a part")
        path = folder / each.file
        chunks = open_upload(path).chunks if path.exists() else []
        found.append(Part(each.file, each.size_bytes, each.crc, chunks))
    return found
