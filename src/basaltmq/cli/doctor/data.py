"""The check of a broker's data directory: which process has it open, its virtual hosts, and its integrity."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from basaltmq.broker.config.settings import Config
from basaltmq.broker.vhost_directory import (
    QUARANTINE,
    STORE,
    VHostDirectories,
    directory_name,
    has_database,
    read_name,
)
from basaltmq.cli.doctor.checks import Finding, State, holder_of
from basaltmq.errors import BasaltError, NotAStoreError
from basaltmq.log.verify import verify_log
from basaltmq.store.directory import LOG, names_in
from basaltmq.store.salvage.verify import verify as verify_store

CHECK = "data"


def data(config: Config, *, verify: bool) -> Iterator[Finding]:
    directories = VHostDirectories(config.data_dir)
    try:
        directories.require_ours()
        is_new = not has_database(directories.node_store)
    except NotAStoreError as error:
        advice = "set data_dir to an empty or new directory, or to the directory of your broker"
        yield Finding(CHECK, State.FAIL, str(error), advice)
        return
    except BasaltError as error:
        yield Finding(CHECK, State.FAIL, str(error), "restore a backup")
        return
    if is_new:
        yield Finding(CHECK, State.OK, f"{config.data_dir} is empty; the first start initializes it")
        return
    holder = holder_of(directories.node_store)
    vhosts = list(_vhosts(directories))
    served = f"served by process {holder}" if holder else "not open"
    yield Finding(CHECK, State.OK, f"{len(vhosts)} virtual hosts in {config.data_dir}, {served}")
    yield from _names(directories)
    set_aside = config.data_dir / QUARANTINE
    if set_aside.is_dir() and any(set_aside.iterdir()):
        count = len(list(set_aside.iterdir()))
        yield Finding(
            CHECK, State.WARN, f"{count} directories in {set_aside}", "inspect them, then move them elsewhere"
        )
    if not verify:
        return
    if holder:
        advice = "verify the running broker with: basalt vhost store verify NAME"
        yield Finding(CHECK, State.WARN, "not verified: a broker has it open", advice)
        return
    for name, store in [("the node", directories.node_store), *vhosts]:
        yield from _verified(name, store)


def _names(directories: VHostDirectories) -> Iterator[Finding]:
    """Find directories of virtual hosts whose name file is missing or names another virtual host."""
    for each in names_in(directories.root):
        try:
            name = read_name(directories.root / each)
        except BasaltError as error:
            advice = (
                "start the broker: it restores the file if it knows the virtual host, and otherwise moves "
                "the directory "
                "to quarantine"
            )
            yield Finding(CHECK, State.WARN, str(error), advice)
            continue
        if directory_name(name) != each:
            text = f"{directories.root / each} names vhost {name!r}, whose directory is {directory_name(name)}"
            yield Finding(CHECK, State.FAIL, text, "restore the right .vhost file")


def _vhosts(directories: VHostDirectories) -> Iterator[tuple[str, Path]]:
    for path in [directories.root / each for each in names_in(directories.root)]:
        try:
            yield f"vhost {read_name(path)!r}", path / STORE
        except BasaltError:
            yield f"the directory {path.name}", path / STORE


def _verified(name: str, store: Path) -> Iterator[Finding]:
    try:
        faults = [*verify_store(store), *verify_log(store / LOG)]
    except BasaltError as error:
        faults = [str(error)]
    for fault in faults:
        yield Finding(CHECK, State.FAIL, f"{name}: {fault}", "restore a backup, or see: basalt store repair --help")
    if not faults:
        yield Finding(CHECK, State.OK, f"{name} is intact: every file was read")
