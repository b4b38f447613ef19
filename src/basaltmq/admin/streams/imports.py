"""Writes of many records at once over HTTP: parts are put, then a batch of a run is committed, once.

    PUT part, PUT part, ...   files beside the store that count for nothing yet; checked record by record as they come
    POST the batch            imported exactly once however often it is asked for (streams/imports.py)

A part that is put twice is the same part; a commit whose answer was lost is sent again and finds the batch done. What
nobody commits is removed after a day. Parts need `write` on every topic they have records for. A run belongs to the
user who commits its first batch: another user could otherwise skip or repeat batches. Administrators may use every run.
"""

from __future__ import annotations

import asyncio
import time
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
from basaltmq.errors import AccessRefusedError, BasaltError, NotFoundError
from basaltmq.store.directory import make_directory, os_error, sync_directory, sync_file
from basaltmq.store.rocks import RocksStore

if TYPE_CHECKING:
    from basaltmq.streams.imports.imports import Imported, Run
    from basaltmq.streams.imports.stage import Part

PART_BYTES_MAX: Final = 256 << 20
"""Of one part: several of the largest records. Clients send some ten MiB at a time."""

PART_TYPES: Final = ("application/vnd.apache.arrow.file", "application/octet-stream")

PARTS_MAX: Final = 100_000
"""Of one batch: terabytes."""

GATHERED_BYTES: Final = 1 << 20
"""Of a body, before a thread writes it."""

COMMIT_BYTES_MAX: Final = 32 << 20


class PutPart(msgspec.Struct):
    """A part as it was taken in."""

    file: str
    size_bytes: int
    crc: int
    """CRC32, as of zlib."""


class BatchSpec(msgspec.Struct):
    """What a batch consists of."""

    parts: list[PutPart]


class _File:
    """A part that is coming in."""

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
        """Everything is durable under its passing name."""
        self._flush()
        assert self._file is not None, "a flush opens it"
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
    """The handlers."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._turns: WeakKeyDictionary[VHost, asyncio.Lock] = WeakKeyDictionary()

    def routes(self) -> list[Route]:
        run = "/api/imports/{vhost}/{run}"
        batch = run + "/{batch}"
        return [
            Route("GET", run, self.one, "How far a run of imports is.",
                  answers="last_batch: the last one that is done, -1 if none; pending: one that a crash cut off."),
            Route("PUT", batch + "/{file}", self.put, "Stage a part: an Arrow IPC file.", sink=self.incoming,
                  body_bytes_max=PART_BYTES_MAX, content_types=PART_TYPES,
                  answers="file, size_bytes and crc, for the commit. The file is named part-NNNNN-HEX32.arrow; its "
                          "schema has key, value, headers, timestamp, and metadata basalt.chunks, JSON: [[topic, "
                          "partition, records], ...], an item per record batch."),
            Route("POST", batch, self.commit, "Import what was staged, exactly once per run and batch.",
                  takes=BatchSpec, body_bytes_max=COMMIT_BYTES_MAX,
                  answers="records; was_done if the batch had been imported before. Batches of a run ascend."),
            Route("DELETE", batch, self.discard, "Forget what was staged and is not being imported."),
            Route("DELETE", run, self.forget, "Forget a run of which no batch can come again."),
        ]  # fmt: skip

    def incoming(self, call: Call) -> _File:
        require_arrow()
        from basaltmq.streams.imports.parcel import NAME

        vhost = self._vhost(call)
        name = call.names["file"]
        if not NAME.fullmatch(name):
            raise HttpError(400, f"a part is named part-NNNNN-HEX32.arrow, not {name[:80]!r}")
        return _File(self._folder(call, vhost), name)

    async def put(self, call: Call) -> Any:
        from basaltmq.streams.imports.parcel import open_parcel

        vhost, file = self._vhost(call), call.body
        with Guard(vhost):
            await asyncio.to_thread(file.finish)
            parcel = await asyncio.to_thread(open_parcel, file.path)
            limits = {}
            topics = vhost.streams.plane.topics
            for chunk in parcel.chunks:
                if chunk.topic not in limits:
                    self._scope.check(call, vhost, WRITE, chunk.topic)
                    topic = await asyncio.to_thread(topics.get, chunk.topic)
                    limits[chunk.topic] = topic.config
                if chunk.partition >= limits[chunk.topic].partitions:
                    raise HttpError(400, f"topic {chunk.topic!r} has no partition {chunk.partition}")
            await asyncio.to_thread(parcel.check, lambda name: limits[name].record_bytes_max)
            return await asyncio.to_thread(file.keep)

    async def commit(self, call: Call) -> Any:
        require_arrow()
        from basaltmq.streams.imports.imports import ONCE, Imports, read_run

        vhost = self._vhost(call)
        if len(call.body.parts) > PARTS_MAX:
            raise HttpError(413, f"a batch has at most {PARTS_MAX} parts")
        run, batch, folder = call.names["run"], _batch(call), self._folder(call, vhost)
        if run.startswith(ONCE):
            raise HttpError(400, f"runs that begin with {ONCE!r} are not remembered; name it otherwise than {run!r}")
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
                raise NotFoundError(f"the part {gone[0]} of batch {batch} of run {run!r} is not staged; put it again")
            return Imports(_store_path(vhost), vhost.store, vhost.streams.plane, _now_ms).run(
                run, batch, parts, owner=call.who.name
            )

        async with self._turn(vhost):
            with Guard(vhost):
                done = await asyncio.to_thread(work)
        for name in names:
            vhost.streams.came(name, vhost.queues.by_name.get(name))
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
        """The virtual host, if it takes records at the moment."""
        vhost = self._scope.vhost(call)
        self._scope.node.permissions.check_vhost(call.who, vhost.name)
        self._scope.check_not_held(vhost)
        return vhost

    def _folder(self, call: Call, vhost: VHost) -> Path:
        from basaltmq.streams.imports.stage import folder_of

        return folder_of(_store_path(vhost), call.names["run"], _batch(call))

    def _turn(self, vhost: VHost) -> asyncio.Lock:
        return self._turns.setdefault(vhost, asyncio.Lock())


def _store_path(vhost: VHost) -> Path:
    if not isinstance(vhost.store, RocksStore):
        raise HttpError(400, f"vhost {vhost.name!r} is kept in memory")
    return vhost.store.path


def _batch(call: Call) -> int:
    text = call.names["batch"]
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise HttpError(400, f"a batch is a number from 0 on, not {text[:40]!r}")
    return int(text)


def _check_owner(call: Call, state: Run) -> None:
    """AccessRefusedError unless the run is the user's, nobody's, or the user is an administrator."""
    if state.owner not in {"", call.who.name} and not allowed(call.who.tags, Access.ADMINISTRATOR):
        raise AccessRefusedError(
            f"run {call.names['run']!r} belongs to user {state.owner!r}; only that user or an administrator changes it"
        )


def _staged_topics(folder: Path) -> set[str]:
    """Topics of the parts in a stage. A file that is no part has none."""
    from basaltmq.streams.imports.parcel import NAME, open_parcel

    topics: set[str] = set()
    if folder.is_dir():
        for path in folder.iterdir():
            if NAME.fullmatch(path.name):
                with suppress(BasaltError):
                    topics |= {chunk.topic for chunk in open_parcel(path).chunks}
    return topics


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _parts(folder: Path, told: list[PutPart]) -> list[Part]:
    """Parts with what their files say of themselves; those of a batch that is done are gone, and not needed."""
    from basaltmq.streams.imports.parcel import NAME, open_parcel
    from basaltmq.streams.imports.stage import Part

    found = []
    for each in told:
        if not NAME.fullmatch(each.file):
            raise HttpError(400, f"there is no part {each.file[:80]!r}")
        path = folder / each.file
        chunks = open_parcel(path).chunks if path.exists() else []
        found.append(Part(each.file, each.size_bytes, each.crc, chunks))
    return found
