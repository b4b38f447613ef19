"""Finds the files of a database without RocksDB: MANIFEST, SST files, blob files and WAL files.

The MANIFEST is used if every record is readable. Otherwise (`Files.manifest` is None) SST and blob files are listed
from the directory. An SST file names its family in the property block near its end, a blob file in its header. Family
names come from the SST files, from SEALS and from the OPTIONS file, which lists families in the order of their numbers.

Without a MANIFEST, obsolete SST files are unknown. RocksDB deletes an SST file as soon as it is obsolete, and its rows
have lower sequence numbers than their replacements. So reading obsolete files changes nothing, unless a crash
interrupted such a deletion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.store.families import BY_LABEL
from basaltmq.store.integrity.manifest import family_numbers, is_openable, oldest_log
from basaltmq.store.integrity.wal import LogScan, current_manifest, scan_log, wal_files, wal_number
from basaltmq.varints import read_varint

_TAIL_BYTES: Final = 16 * 1024
"""Bytes that contain the property block of an SST file. The block has about 1 KiB, and only the footer and a small
block follow it."""

_TABLE_FAMILY: Final = re.compile(rb"column\.family\.id[\x00-\xff]{1,5}?\x16\x04([\x01-\x7f])name", re.DOTALL)
"""Two adjacent entries of the property block. The second key, `rocksdb.column.family.name`, shares 22 bytes (0x16) with
the first, so only its last 4 are stored. The byte before `name` is the length of the value."""

_OPTIONS_FAMILY: Final = re.compile(r'^\[CFOptions "(.*)"\]$', re.MULTILINE)

_BLOB_HEAD: Final = Struct("<III")
"""Magic, version and family of a blob file."""

_TABLE_NAME: Final = re.compile(r"(\d{6,})\.(sst|blob)")


@dataclass(slots=True)
class Files:
    """The files of one database."""

    database: Path
    manifest: LogScan | None = None
    """The MANIFEST in use, None if it is missing or damaged."""
    manifest_fault: str = ""
    manifest_path: Path | None = None
    families: dict[str, int] = field(default_factory=dict)
    tables: dict[str, str] = field(default_factory=dict)
    """SST file -> family from its property block, empty if unknown."""
    blobs: dict[str, str] = field(default_factory=dict)
    logs: list[LogScan] = field(default_factory=list)
    """The required WAL files, oldest first."""


def find_files(database: Path, sealed_families: Mapping[str, int], manifest_fault: str = "") -> Files:
    """Find the files of a database.

    `sealed_families` are the family numbers in SEALS. `manifest_fault` is a known fault of the MANIFEST.
    """
    files = Files(database, manifest_fault=manifest_fault)
    try:
        files.manifest_path = current_manifest(database)
    except CorruptionError as error:
        files.manifest_fault = str(error).split(";")[0].removeprefix(f"{database / 'CURRENT'} ")
        files.manifest_path = _latest_manifest(database)
    if files.manifest_path is not None:
        scan = scan_log(files.manifest_path)
        is_whole = scan.records and (scan.fault is None or scan.is_cut_short)
        if is_whole and is_openable(files.manifest_path) and not manifest_fault:
            files.manifest = scan
        else:
            what = "it lacks records" if scan.fault is None else f"{scan.fault.what} at byte {scan.fault.offset}"
            files.manifest_fault = files.manifest_fault or what
    oldest = 0
    if files.manifest is not None:
        oldest = oldest_log(files.manifest.path)
        files.families = family_numbers(files.manifest.path)
    for path in sorted(database.iterdir()):
        if not _TABLE_NAME.fullmatch(path.name):
            continue
        (files.tables if path.suffix == ".sst" else files.blobs)[path.name] = ""
    if files.manifest is None:
        _find_families(files, sealed_families)
    files.logs = [scan_log(path) for path in wal_files(database) if wal_number(path) >= oldest]
    return files


def _latest_manifest(database: Path) -> Path | None:
    """Return the newest MANIFEST, for a CURRENT that names none."""
    found = sorted(path for path in database.glob("MANIFEST-*") if path.suffix != ".dbtmp")
    return found[-1] if found else None


def _find_families(files: Files, sealed: Mapping[str, int]) -> None:
    numbers = {"default": 0, **_from_options(files.database), **sealed}
    for name in files.tables:
        label, number = table_family(files.database / name)
        if label:
            files.tables[name] = label
            numbers[label] = number
    labels = {number: label for label, number in numbers.items()}
    for name in files.blobs:
        with open(files.database / name, "rb") as file:
            head = file.read(_BLOB_HEAD.size)
        if len(head) == _BLOB_HEAD.size:
            files.blobs[name] = labels.get(_BLOB_HEAD.unpack(head)[2], "")
    files.families = numbers


def table_family(path: Path) -> tuple[str, int]:
    """Return label and number of an SST file's family from its property block, ("", 0) if unknown."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        tail = file.read()
    found = list(_TABLE_FAMILY.finditer(tail))
    if not found:
        return "", 0
    end = found[-1].end()
    label = tail[end : end + found[-1][1][0]].decode("utf-8", "replace")
    number, _ = read_varint(tail, found[-1].start() + len(b"column.family.id"))
    return (label, number) if label in BY_LABEL else ("", 0)


def _from_options(database: Path) -> dict[str, int]:
    """Return family numbers by order in the newest OPTIONS file. Basalt drops no families, so there are no gaps."""
    found = sorted(path for path in database.glob("OPTIONS-*") if path.suffix != ".dbtmp")
    if not found:
        return {}
    text = found[-1].read_text("utf-8", "replace")
    return {label: number for number, label in enumerate(_OPTIONS_FAMILY.findall(text)) if label in BY_LABEL}
