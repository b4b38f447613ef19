"""Manifests: the list of files that belong to an archive.

    archive/
      topic=orders/day=2026-11-15/000007-0-000000000120-000000000239.parquet     batch, partition, first and last offset
      _manifests/000007.json
      _staging/                                                                  files of an unfinished batch

A batch is committed when its manifest exists. The manifest names the files of the batch with their offset ranges,
counts and sizes, and a checksum of all records that does not depend on their order. Replay, compact and audit follow
the manifests, so files that a killed job left are ignored.

A manifest is never changed. A compaction writes a manifest with a number above Spark's batch numbers, which names the
manifests it replaces. The replaced ones stay, because the archive job uses them to find out which batches are done.
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
"""Number of the first compaction. Spark's batch numbers stay below."""

CHECKSUM: Final = "bit_xor(xxhash64(topic, partition, offset, key, value, timestamp))"
"""SQL expression for the checksum of a batch."""


class ArchivedFile(msgspec.Struct, frozen=True):
    path: str
    """Relative to the archive."""
    topic: str
    partition: int
    first_offset: int
    last_offset: int
    records: int
    size_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    batch: int
    records: int
    checksum: int
    files: list[ArchivedFile]
    offsets: dict[str, dict[str, list[int]]]
    """[first, last] by topic and partition."""
    replaces: list[int] = []
    """Manifests that this one replaces after a compaction."""
    rejected: int = 0
    """Records that did not parse."""
    rejected_in: list[int] = []
    """After a compaction: batch numbers of their rejects."""
    layout: int = LAYOUT

    def rejects_of(self) -> list[int]:
        """Return the batch numbers below `_rejected` that belong to this manifest."""
        return (self.rejected_in or [self.batch]) if self.rejected else []


_decode: Final = json_decoder(Manifest)


def offsets_of(files: list[ArchivedFile]) -> dict[str, dict[str, list[int]]]:
    """Return [first, last] by topic and partition."""
    found: dict[str, dict[str, list[int]]] = {}
    for file in files:
        known = found.setdefault(file.topic, {}).setdefault(str(file.partition), [file.first_offset, file.last_offset])
        known[0] = min(known[0], file.first_offset)
        known[1] = max(known[1], file.last_offset)
    return found


def path_of(root: str, batch: int) -> str:
    return f"{root}/{FOLDER}/{batch:06d}.json"


def write_manifest(files: Files, root: str, manifest: Manifest) -> None:
    """Commit a batch."""
    files.write_json(path_of(root, manifest.batch), manifest)


def read_manifests(files: Files, root: str) -> list[Manifest]:
    """Return the manifests in order, without replaced ones."""
    found: dict[int, Manifest] = {}
    for name in files.names(f"{root}/{FOLDER}"):
        if not name.endswith(".json") or name.startswith("."):
            continue
        try:
            manifest = _decode(files.read(f"{root}/{FOLDER}/{name}"))
        except msgspec.DecodeError as error:
            raise CorruptionError(f"the manifest {root}/{FOLDER}/{name} cannot be read: {error}") from None
        if manifest.layout > LAYOUT:
            raise CorruptionError(
                f"the manifest {name} has layout {manifest.layout}; this version supports {LAYOUT}: upgrade Basalt"
            )
        found[manifest.batch] = manifest
    replaced = {batch for manifest in found.values() for batch in manifest.replaces}
    return [manifest for batch, manifest in sorted(found.items()) if batch not in replaced]
