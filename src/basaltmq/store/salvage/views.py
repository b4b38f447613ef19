"""Read-only databases over the files of a damaged one, which is never written.

A view is a directory of links to SST and blob files with its own MANIFEST, opened read-only. It can omit SST files: to
read the others where one is damaged, or to read one alone.

    MANIFEST    a copy of the one in use, plus edits that remove SST files; or one built from the list of files
    WAL         every complete record of the required WAL files, which RocksDB replays into memory
    blob files  links. A file that is missing, or without a valid header or footer, is replaced by a copy with both and
                zeros for missing bytes, because RocksDB otherwise rejects the whole file. A value in the zeros does not
                match its checksum.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rocksdict import AccessType, BlockBasedOptions, Options, Rdict

from basaltmq.store.families import BY_LABEL
from basaltmq.store.integrity.blobs import is_framed, write_frame
from basaltmq.store.integrity.manifest import ListedTable, without_table, write_manifest
from basaltmq.store.integrity.wal import DamagedRecord, append_record, salvage_records, write_record
from basaltmq.store.options import BLOOM_BITS_PER_KEY
from basaltmq.store.rocks_errors import translate
from basaltmq.store.salvage.files import Files

OPEN_MAX: Final = 4
"""Views kept open: reading alternates between all SST files, one alone, and all but the damaged one."""

ABSENT_MAX: Final = 10_000
"""Most numbers of missing blob files to try, latest first: about 1 MB in a MANIFEST."""

ABSENT_BEYOND: Final = 100
"""Numbers to try after the last existing file, because the missing file may have been the last."""

_REPAIRED: Final = "repaired"
_MANIFEST: Final = "MANIFEST-000001"

_TABLE_LINE: Final = re.compile(
    r"^(?:--- level (?P<level>\d+) ---"
    r"| (?P<number>\d+):\d+\[[^\]]*\]\['(?P<first>[0-9A-F]*)' .*? \.\. '(?P<last>[0-9A-F]*)' )",
    re.MULTILINE,
)
"""The property `rocksdb.sstables`: a heading per level, then number:size[sequences]['first key' .. 'last key']."""

BLOB_LINE: Final = re.compile(r"^blob_file_number: (\d+) ", re.MULTILINE)
"""A blob file in the same property."""


@dataclass(slots=True)
class Table:
    """An SST or blob file that belongs to a database."""

    family: str
    first: bytes = b""
    last: bytes | None = None
    """None if unknown."""
    level: int = 0
    is_missing: bool = False


class Views:
    """Opens views. Close it to release its files."""

    def __init__(self, files: Files, folder: Path) -> None:
        self._files = files
        files.database = files.database.resolve()
        self.folder = folder.resolve()
        self._directories: list[Path] = []
        self._open: dict[tuple[str, frozenset[str]], tuple[Rdict, Rdict]] = {}
        self._whole: Rdict | None = None
        """The view with all SST files."""
        self._families: dict[str, Rdict] = {}
        self._repaired: dict[str, Path] = {}
        self.damaged_logs: dict[Path, list[DamagedRecord]] = {}
        (folder / _REPAIRED).mkdir(parents=True)
        self._log_records: dict[str, Path] = {}
        self._copy_logs()
        self.tables: dict[str, Table] = {}
        """SST and blob files of the database, including missing ones."""
        if files.manifest is None:
            self._add_listed_files()
        else:
            self._add_manifest_files()
        for name, table in self.tables.items():
            if name.endswith(".blob"):
                path = files.database / name
                if table.is_missing or not is_framed(path, files.families[table.family]):
                    self.substitute(name, table.family)

    @property
    def families(self) -> list[str]:
        return list(self._files.families)

    def family(self, label: str, without: frozenset[str] = frozenset()) -> Rdict:
        """Return a family without some of its SST files. Do not keep it: opening other views closes it."""
        if not without:
            if self._whole is None:
                self._open_whole()
            return self._families[label]
        at = (label, without)
        found = self._open.pop(at, None)
        if found is None:
            if len(self._open) >= OPEN_MAX:
                _close(*self._open.pop(next(iter(self._open))))
            db = self._opened(self._directory(without, label), [label])
            found = (db, _family_of(db, label))
        self._open[at] = found
        return found[1]

    def with_filters(self, label: str) -> tuple[Rdict, Rdict]:
        """Open a database, and in it a family whose bloom filters are read. The caller closes both."""
        db = self._opened(self._directory(frozenset(), label), [label], lenient_options(bloom=True))
        return db, _family_of(db, label)

    def substitute(self, name: str, family: str) -> bool:
        """Replace a missing or damaged blob file to make the keys of its values readable. False if already replaced."""
        if name in self._repaired:
            return False
        self._repair_file(name, family)
        for directory in self._directories:
            link = directory / name
            link.unlink(missing_ok=True)
            link.symlink_to(self._repaired[name])
        return True

    def missing(self) -> frozenset[str]:
        return frozenset(name for name, table in self.tables.items() if table.is_missing and name.endswith(".sst"))

    def others(self, table: str) -> frozenset[str]:
        """Return all SST files of a family except one."""
        family = self.tables[table].family
        return frozenset(
            name
            for name, each in self.tables.items()
            if each.family == family and name != table and name.endswith(".sst")
        )

    def close(self) -> None:
        while self._open:
            _close(*self._open.popitem()[1])
        self._close_whole()

    def _opened(self, directory: Path, labels: list[str], family_options: Options | None = None) -> Rdict:
        options = {label: family_options or lenient_options() for label in labels if label != "default"}
        try:
            return Rdict(str(directory), lenient_options(), options, AccessType.read_only(False))
        except Exception as error:
            raise translate(error, self._files.database) from error

    def _directory(self, without: frozenset[str], only: str | None) -> Path:
        """Create a directory to open, with the files of all families or of one."""
        directory = self.folder / f"view-{len(self._directories) + 1}"
        directory.mkdir()
        self._directories.append(directory)
        without = without | self.missing()
        names = list(self.tables) or [*self._files.tables, *self._files.blobs]
        for name in names:
            path = self._repaired.get(name, self._files.database / name)
            if only is not None and name in self.tables and self.tables[name].family != only:
                continue
            if name not in without and path.exists():
                (directory / name).symlink_to(path)
        for name, path in self._log_records.items():
            (directory / name).symlink_to(path)
        self._write_manifest(directory / _MANIFEST, without)
        (directory / "CURRENT").write_text(f"{_MANIFEST}\n")
        return directory

    def _write_manifest(self, target: Path, without: frozenset[str]) -> None:
        manifest, database = self._files.manifest, self._files.database
        if manifest is None:
            tables: dict[str, list[ListedTable]] = {}
            blobs: dict[str, list[int]] = {}
            for name, table in self.tables.items():
                if name.endswith(".blob"):
                    blobs.setdefault(table.family, []).append(int(name[:-5]))
                elif name not in without:
                    size_bytes = (database / name).stat().st_size
                    tables.setdefault(table.family, []).append(ListedTable(int(name[:-4]), size_bytes))
            self._add_absent(blobs)
            write_manifest(target, self._files.families, tables, blobs)
            return
        shutil.copyfile(manifest.path, target)
        if manifest.fault is not None:
            with open(target, "r+b") as file:
                file.truncate(manifest.fault.cut_at)
        for name in sorted(without):
            table = self.tables[name]
            number = self._files.families[table.family]
            append_record(target, without_table(number, table.level, int(name[:-4])))

    def _add_absent(self, blobs: dict[str, list[int]]) -> None:
        """List unused file numbers as blob files. RocksDB's error then names a missing one."""
        taken = {int(name.split(".")[0]) for name in self.tables}
        last = max(taken, default=0) + ABSENT_BEYOND
        absent = [number for number in range(1, last) if number not in taken][-ABSENT_MAX:]
        for label in self.families:
            if BY_LABEL[label].profile.blob_bytes_min is not None:
                blobs.setdefault(label, []).extend(absent)

    def _copy_logs(self) -> None:
        """Prepare WAL files for replay by RocksDB: links to intact ones, copies of the valid records of others."""
        for scan in self._files.logs:
            if scan.fault is None:
                self._log_records[scan.path.name] = scan.path.resolve()
                continue
            target = self.folder / _REPAIRED / scan.path.name
            with open(target, "wb") as log:
                at = 0
                for record in salvage_records(scan.path):
                    if isinstance(record, DamagedRecord):
                        self.damaged_logs.setdefault(scan.path, []).append(record)
                    else:
                        at = write_record(log, at, record)
            self._log_records[scan.path.name] = target

    def _add_listed_files(self) -> None:
        """Without a MANIFEST, add every file that names its family."""
        for name, family in {**self._files.tables, **self._files.blobs}.items():
            if family:
                self.tables[name] = Table(family)

    def _add_manifest_files(self) -> None:
        """Add the files in the MANIFEST, as RocksDB lists them."""
        self._open_whole()
        known: dict[str, Table] = {}
        for label, family in self._families.items():
            self._parse_files(known, label, family.property_value("rocksdb.sstables") or "")
        for name, table in known.items():
            table.is_missing = not (self._files.database / name).exists()
        self.tables = known
        if any(table.is_missing for table in known.values()):
            # The next view omits the missing files.
            self._close_whole()

    def _open_whole(self) -> None:
        self._whole = self._opened(self._directory(frozenset(), None), self.families)
        self._families = {each: _family_of(self._whole, each) for each in self.families}

    def _close_whole(self) -> None:
        for family in self._families.values():
            if family is not self._whole:
                family.close()
        self._families = {}
        if self._whole is not None:
            self._whole.close()
            self._whole = None

    def _parse_files(self, known: dict[str, Table], label: str, listing: str) -> None:
        level = 0
        for entry in _TABLE_LINE.finditer(listing):
            if entry["level"]:
                level = int(entry["level"])
                continue
            first, last = bytes.fromhex(entry["first"]), bytes.fromhex(entry["last"])
            known[f"{int(entry['number']):06}.sst"] = Table(label, first, last, level)
        for number in BLOB_LINE.findall(listing):
            known[f"{int(number):06}.blob"] = Table(label)

    def _repair_file(self, name: str, family: str) -> None:
        """Write the header and footer without which RocksDB rejects a blob file."""
        path = self._files.database / name
        target = self.folder / _REPAIRED / name
        if path.exists():
            shutil.copyfile(path, target)
        else:
            target.touch()
        write_frame(target, self._files.families[family])
        self._repaired[name] = target


def lenient_options(*, bloom: bool = False) -> Options:
    """Return options that open a database with damaged SST files and read what is readable.

    Without `bloom`, filters are not read, so a damaged one hides no row.
    """
    options = Options(raw_mode=True)
    if bloom:
        table = BlockBasedOptions()
        table.set_bloom_filter(BLOOM_BITS_PER_KEY, False)
        options.set_block_based_table_factory(table)
    options.set_paranoid_checks(False)
    options.set_max_open_files(64)
    options.set_stats_dump_period_sec(0)
    return options


def _family_of(db: Rdict, label: str) -> Rdict:
    return db if label == "default" else db.get_column_family(label)


def _close(db: Rdict, family: Rdict) -> None:
    family.close()
    if family is not db:
        db.close()
