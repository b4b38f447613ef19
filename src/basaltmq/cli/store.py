"""`basalt store`: the operator's tools on a store that no process has open, or beside one where that is possible."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import click

import basaltmq
from basaltmq.cli.output import progress_line, show
from basaltmq.embedded.database import LOG
from basaltmq.embedded.mending import mend_planes
from basaltmq.log.verify import verify_log
from basaltmq.queues.recovery.verify import verify_rows
from basaltmq.store import checkpoint as backups
from basaltmq.store.directory import CHECKSUMS, read_marker
from basaltmq.store.families import Family, family_of
from basaltmq.store.open import open_store, open_view
from basaltmq.store.rocks import RocksStore
from basaltmq.store.salvage.repair import repair as repair_store
from basaltmq.store.salvage.verify import verify as verify_store

FINDINGS = 2
"""Exit code of a check that found something."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
family_option = click.option("--family", help="One family; all of them if not given.")


@click.group()
def store() -> None:
    """Look at, back up, check and mend a store."""


@store.command()
@as_json
@click.pass_obj
def info(data_dir: Path, as_json: bool) -> None:
    """Families, rows and sizes. Works beside a running process."""
    view = open_view(data_dir)
    try:
        rows = [{"family": family.label, **_short(view, family)} for family in Family if _short(view, family)["rows"]]
        rows.append({"family": "all", **_short(view, None)})
        marker = read_marker(data_dir)
        if not as_json and marker is not None:
            click.echo(f"store {marker.store_id} at {data_dir}\n")
        show(rows, as_json=as_json)
    finally:
        view.close()


def _short(view: RocksStore, family: Family | None) -> dict[str, int]:
    found = view.properties(family)
    return {
        "rows": found["estimated-rows"],
        "table bytes": found["sst-bytes"],
        "blob bytes": found["blob-bytes"],
        "memory bytes": found["memtable-bytes"],
    }


@store.command()
@family_option
@as_json
@click.pass_obj
def properties(data_dir: Path, family: str | None, as_json: bool) -> None:
    """RocksDB's figures, of one family or summed. Works beside a running process."""
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
    """Read everything back and name each damaged file, and each damaged or quarantined row of a queue.

    PATH: a store or a backup; else the data directory.

    Exit code 2 if anything was found.
    """
    where = path or data_dir
    faults = verify_store(where, progress_line("verify"))
    if not (where / CHECKSUMS).exists():
        faults += verify_log(where / LOG, progress_line("verify log"))
    if not faults:
        # Rows are read from files that are sound.
        with closing(open_view(where)) as view:
            faults = verify_rows(view)
    show([{"fault": fault} for fault in faults], as_json=as_json, empty=f"{where} is sound")
    if faults:
        raise SystemExit(FINDINGS)


@store.command()
@click.argument("target", type=click.Path(path_type=Path))
@click.pass_obj
def backup(data_dir: Path, target: Path) -> None:
    """Make a backup at TARGET, which must not exist. A process that has the store open makes its own: `db.backup`."""
    with basaltmq.open(data_dir, create=False) as db:
        db.backup(target)
    click.echo(f"backup of {data_dir} at {target}; check it with: basalt store verify {target}")


@store.command()
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("target", type=click.Path(path_type=Path))
def restore(source: Path, target: Path) -> None:
    """Copy the backup SOURCE to TARGET, which must not exist, after checking every file of it."""
    backups.restore(source, target)
    click.echo(f"{source} restored to {target}")


@store.command()
@click.option("--accept-loss", is_flag=True, help="Change the store; without it, only say what would be lost.")
@as_json
@click.pass_obj
def repair(data_dir: Path, accept_loss: bool, as_json: bool) -> None:
    """Make a damaged store open again, with every row that can be read. Restore a backup instead if you have one.

    The damaged files and the list of all losses go to quarantine/. Exit code 2 if the store is not sound afterwards,
    or without --accept-loss if it is not sound now.
    """
    outcome = repair_store(data_dir, accept_loss=accept_loss, mend=mend_planes, progress=progress_line("repair"))
    rows = [{"kind": "done" if accept_loss else "would do", "what": line} for line in outcome.done]
    rows += [{"kind": "lost" if accept_loss else "would be lost", "what": loss.line()} for loss in outcome.losses]
    rows += [{"kind": "fault", "what": line} for line in outcome.remaining]
    show(rows, as_json=as_json, empty="nothing to repair")
    if outcome.kept is not None and not as_json:
        click.echo(f"\nthe damaged files and the list of all losses: {outcome.kept}")
    if not accept_loss and rows:
        click.echo("nothing was changed; run it again with --accept-loss to repair the store", err=True)
    if outcome.remaining or (rows and not accept_loss):
        raise SystemExit(FINDINGS)


@store.command()
@family_option
@click.pass_obj
def compact(data_dir: Path, family: str | None) -> None:
    """Rewrite the files without what was deleted."""
    chosen = family_of(family) if family else None
    opened = open_store(data_dir, create=False)
    try:
        before = opened.size_bytes()
        opened.compact(chosen)
        click.echo(f"{before:,} bytes before, {opened.size_bytes():,} after")
    finally:
        opened.close()
