"""Manifests: what an archive consists of.

    archive/
      topic=orders/day=2026-11-15/000007-0-000000000120-000000000239.parquet     batch, partition, first and last offset
      _manifests/000007.json
      _staging/                                                                  what a batch is writing; not data

A batch counts when its manifest is there, and the manifest names its files with their ranges of offsets, counts and
sizes, and a checksum of all its records that does not depend on their order. Everything that reads an archive (replay,
compact, audit) goes by the manifests, so a file that a killed job left is no data. A manifest is written once;
compaction writes another one, numbered beyond what Spark counts to, that says which manifests it replaces; those stay,
because the archive job asks them which batches are done.
"""

from __future__ import annotations

from typing import Final

import msgspec

from basaltmq.decoding import json_decoder
from basaltmq.errors import CorruptionError
from basaltmq.pipeline.files import Files

LAYOUT: Final = 1
FOLDER: Final = "_manifests"
STAGING: Final = "_staging"

COMPACTED: Final = 1_000_000_000
"""Batches from this number on are made by compaction; Spark's numbers stay below."""

CHECKSUM: Final = "bit_xor(xxhash64(topic, partition, offset, key, value, timestamp))"
"""Of all records of a batch, in SQL."""


class ArchivedFile(msgspec.Struct, frozen=True):
    """A file of an archive."""

    path: str
    """Relative to the archive."""
    topic: str
    partition: int
    first_offset: int
    last_offset: int
    records: int
    size_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of an archive."""

    batch: int
    records: int
    checksum: int
    files: list[ArchivedFile]
    offsets: dict[str, dict[str, list[int]]]
    """By topic and partition: first and last offset."""
    replaces: list[int] = []
    """Manifests whose records are in this one since a compaction."""
    rejected: int = 0
    """Records that did not parse and are in the table of rejects."""
    rejected_in: list[int] = []
    """After a compaction: the batches under which they are there."""
    layout: int = LAYOUT

    def rejects_of(self) -> list[int]:
        """Batches under which the table of rejects has records of this one."""
        return (self.rejected_in or [self.batch]) if self.rejected else []


_decode: Final = json_decoder(Manifest)


def offsets_of(files: list[ArchivedFile]) -> dict[str, dict[str, list[int]]]:
    """First and last offset by topic and partition."""
    found: dict[str, dict[str, list[int]]] = {}
    for file in files:
        known = found.setdefault(file.topic, {}).setdefault(str(file.partition), [file.first_offset, file.last_offset])
        known[0] = min(known[0], file.first_offset)
        known[1] = max(known[1], file.last_offset)
    return found


def path_of(root: str, batch: int) -> str:
    return f"{root}/{FOLDER}/{batch:06d}.json"


def write_manifest(files: Files, root: str, manifest: Manifest) -> None:
    """Make a batch count."""
    files.write(path_of(root, manifest.batch), msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def read_manifests(files: Files, root: str) -> list[Manifest]:
    """Manifests that count, in order: those that no other one replaces."""
    found: dict[int, Manifest] = {}
    for name in files.names(f"{root}/{FOLDER}"):
        if not name.endswith(".json") or name.startswith("."):
            continue
        try:
            manifest = _decode(files.read(f"{root}/{FOLDER}/{name}"))
        except msgspec.DecodeError as error:
            raise CorruptionError(f"the manifest {root}/{FOLDER}/{name} cannot be read: {error}") from None
        if manifest.layout > LAYOUT:
            raise CorruptionError(f"the manifest {name} is of layout {manifest.layout}; this version knows {LAYOUT}")
        found[manifest.batch] = manifest
    replaced = {batch for manifest in found.values() for batch in manifest.replaces}
    return [manifest for batch, manifest in sorted(found.items()) if batch not in replaced]
