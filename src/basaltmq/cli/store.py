"""`basalt store`: inspection, backup, verification and repair of a store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

import basaltmq
from basaltmq.cli.options import as_json, family_option
from basaltmq.cli.output import FINDINGS, progress_line, show
from basaltmq.embedded.reconcile import reconcile_planes
from basaltmq.errors import BasaltError
from basaltmq.log.segment import Segment
from basaltmq.log.verify import verify_log
from basaltmq.queues.recovery.verify import verify_rows
from basaltmq.store import checkpoint as backups
from basaltmq.store.directory import CHECKSUMS, LOG, read_marker
from basaltmq.store.families import Family, family_of
from basaltmq.store.open import open_store, open_view
from basaltmq.store.repair import repair as repair_store
from basaltmq.store.rocks import RocksStore
from basaltmq.store.salvage.naming import shard_topics
from basaltmq.store.salvage.verify import verify as verify_store
from basaltmq.streams.engines.segment.ceilings import ceilings_of
from basaltmq.streams.engines.segment.lost_frames import Offsets, lost_frames
from basaltmq.streams.engines.segment.missing_bytes import missing_bytes


@click.group()
def store() -> None:
    """Inspect, back up, verify and repair a store."""


@store.command()
@as_json
@click.pass_obj
def info(data_dir: Path, as_json: bool) -> None:
    """Show column families with row counts and sizes. Works while another process has the store open."""
    view = open_view(data_dir)
    try:
        rows = [
            {"family": family.label, **_figures(view, family)} for family in Family if _figures(view, family)["rows"]
        ]
        rows.append({"family": "all", **_figures(view, None)})
        marker = read_marker(data_dir)
        if not as_json and marker is not None:
            click.echo(f"store {marker.store_id} at {data_dir}\n")
        show(rows, as_json=as_json)
    finally:
        view.close()


def _figures(view: RocksStore, family: Family | None) -> dict[str, int]:
    found = view.properties(family)
    return {
        "rows": found["estimated-rows"],
        "SST bytes": found["sst-bytes"],
        "blob bytes": found["blob-bytes"],
        "memory bytes": found["memtable-bytes"],
    }


@store.command()
@family_option
@as_json
@click.pass_obj
def properties(data_dir: Path, family: str | None, as_json: bool) -> None:
    """Show RocksDB properties of one column family or of all. Works while another process has the store open."""
    view = open_view(data_dir)
    try:
        found = view.properties(family_of(family) if family else None)
        show([{"property": name, "value": value} for name, value in found.items()], as_json=as_json)
    finally:
        view.close()


@store.command()
@click.argument("path", type=click.Path(path_type=Path), required=False)
@as_json
@click.pass_obj
def verify(data_dir: Path, path: Path | None, as_json: bool) -> None:
    """Read all data and report damage.

    The report names each damaged file, and each damaged or quarantined row of a queue.

    PATH is a store or a backup; the default is the data directory.

    The exit code is 2 if anything was found.
    """
    where = path or data_dir
    faults = verify_store(where, progress_line("verify"))
    if not (where / CHECKSUMS).exists():
        faults += verify_log(
            where / LOG,
            progress_line("verify log"),
            lambda: _shard_topics(where),
            partial(_missing_bytes, where),
            partial(_lost_frames, where),
            partial(_ceilings, where),
        )
    if not faults:
        # Damaged files would make the rows unreadable.
        with closing(open_view(where)) as view:
            faults = verify_rows(view)
    show([{"fault": fault} for fault in faults], as_json=as_json, empty=f"{where} is intact")
    if faults:
        raise SystemExit(FINDINGS)


def _shard_topics(path: Path) -> dict[int, str]:
    """Topics by shard; none if the store does not open."""
    try:
        with closing(open_view(path)) as view:
            return shard_topics(view.scan)
    except BasaltError:
        return {}


def _missing_bytes(path: Path, lane: int, segments: Sequence[Segment], durable: int) -> list[tuple[int, int]]:
    """Lost bytes between the segments of a lane; none if the store does not open."""
    try:
        with closing(open_view(path)) as view:
            return missing_bytes(view, lane, segments, durable)
    except BasaltError:
        return []


def _lost_frames(path: Path, lane: int, ranges: Sequence[tuple[int, int]]) -> list[list[Offsets]]:
    """Offsets that the index has in lost bytes; none if the store does not open."""
    try:
        with closing(open_view(path)) as view:
            return lost_frames(view, lane, ranges)
    except BasaltError:
        return [[] for _ in ranges]


def _ceilings(path: Path, lane: int) -> dict[int, int]:
    """Ceilings of a lane's shards; none if the store does not open."""
    try:
        with closing(open_view(path)) as view:
            return ceilings_of(view, path, lane)
    except BasaltError:
        return {}


@store.command()
@click.argument("target", type=click.Path(path_type=Path))
@click.pass_obj
def backup(data_dir: Path, target: Path) -> None:
    """Create a backup at TARGET, which must not exist. A process with an open store calls `db.backup` instead."""
    with basaltmq.open(data_dir, create=False) as db:
        db.backup(target)
    click.echo(f"backup of {data_dir} at {target}; check it with: basalt store verify {target}")


@store.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("target", type=click.Path(path_type=Path))
def restore(source: Path, target: Path) -> None:
    """Verify the backup SOURCE and copy it to TARGET.

    TARGET must not exist.
    """
    backups.restore(source, target)
    click.echo(f"{source} restored to {target}")


@store.command()
@click.option(
    "--accept-loss", is_flag=True, help="Repair the store. Without this flag, only report what would be lost."
)
@as_json
@click.pass_obj
def repair(data_dir: Path, accept_loss: bool, as_json: bool) -> None:
    """Repair a damaged store, keeping every row that can be read. Restore a backup instead if you have one.

    The damaged files and a list of all losses go to quarantine/. The exit code is 2 if the store is damaged afterwards,
    or, without --accept-loss, if it is damaged now.
    """
    outcome = repair_store(
        data_dir, accept_loss=accept_loss, reconcile=reconcile_planes, progress=progress_line("repair")
    )
    done, lost = ("done", "lost") if accept_loss else ("would do", "would be lost")
    rows: list[dict[str, Any]] = [{"kind": done, "what": line} for line in outcome.done]
    for loss in outcome.losses:
        # The table shows some of the ids; JSON has them all, and the key ranges.
        whole = msgspec.to_builtins(loss) if as_json else {}
        rows.append({"kind": lost, "what": loss.line(), **whole})
    rows += [{"kind": "fault", "what": line} for line in outcome.remaining]
    show(rows, as_json=as_json, empty="nothing to repair")
    if outcome.kept is not None and not as_json:
        click.echo(f"\ndamaged files and list of losses: {outcome.kept}")
    if not accept_loss and rows:
        click.echo("nothing was changed; run again with --accept-loss to repair the store", err=True)
    if outcome.remaining or (rows and not accept_loss):
        raise SystemExit(FINDINGS)


@store.command()
@family_option
@click.pass_obj
def compact(data_dir: Path, family: str | None) -> None:
    """Compact the SST files to reclaim the space of deleted rows."""
    chosen = family_of(family) if family else None
    opened = open_store(data_dir, create=False)
    try:
        before = opened.size_bytes()
        opened.compact(chosen)
        click.echo(f"{before:,} bytes before, {opened.size_bytes():,} after")
    finally:
        opened.close()
