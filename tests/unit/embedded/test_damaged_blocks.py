"""A damaged block of counts or leases costs a recount or a redelivery, not the store (P7, P11)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import basaltmq
from basaltmq.cli.main import main
from basaltmq.embedded.database import Settings
from basaltmq.queues.transactions.xid import Xid
from basaltmq.store.families import Family
from basaltmq.store.salvage.files import table_family
from basaltmq.store.salvage.unreadable import UNREADABLE

pytestmark = [pytest.mark.promise("P7", "P11")]

QUEUES = 4
MESSAGES = 30
LEASED = 10
ACKED = 4
HOUR_MS = 3_600_000
QUIET = Settings(maintenance_interval_s=3600.0)


def filled(path: Path, family: Family) -> tuple[set[bytes], set[bytes]]:
    """Fill queues, close the store and flip a bit in the first block of a family. Return ready and leased messages."""
    ready: set[bytes] = set()
    leased: set[bytes] = set()
    with basaltmq.open(path, settings=QUIET) as db:
        for number in range(QUEUES):
            queue = db.queue(f"q{number}")
            queue.enqueue([b"%d-%d" % (number, at) for at in range(MESSAGES)])
            held = queue.lease(LEASED, visibility_ms=HOUR_MS)
            queue.ack(held[:ACKED])
            leased |= {each.payload for each in held[ACKED:]}
            ready |= {b"%d-%d" % (number, at) for at in range(LEASED, MESSAGES)}
    tables = [table for table in (path / "kv").glob("*.sst") if table_family(table)[0] == family.label]
    assert tables
    for table in tables:
        raw = bytearray(table.read_bytes())
        raw[10] ^= 4
        table.write_bytes(raw)
    return ready, leased


@pytest.mark.parametrize(
    "family", [Family.QUEUE_STATS, Family.LEASES, Family.LEASE_EXPIRY], ids=lambda family: family.label
)
def test_every_queue_is_served_after_a_flipped_bit(tmp_path: Path, family: Family) -> None:
    path = tmp_path / "data"
    ready, leased = filled(path, family)
    if family is Family.LEASES:
        ready, leased = ready | leased, set()
    verify = CliRunner().invoke(main, ["--data-dir", str(path), "store", "verify", "--json"])
    assert verify.exit_code == 2
    for _ in range(2):
        # The second open must not depend on anything that the first one found.
        with basaltmq.open(path, settings=QUIET) as db:
            found: set[bytes] = set()
            for number in range(QUEUES):
                queue = db.queue(f"q{number}")
                assert queue.stats()["messages"] == MESSAGES - ACKED
                messages = queue.lease(MESSAGES)
                if family is Family.LEASES:
                    assert all(message._delivery.redelivered for message in messages), "some were delivered before"
                found |= {message.payload for message in messages}
                queue.release(messages)
            assert found == ready
    said = path / "quarantine" / UNREADABLE
    if family is not Family.LEASE_EXPIRY:
        assert {json.loads(line)["family"] for line in said.read_text().splitlines()} == {family.label}
    repaired = CliRunner().invoke(main, ["--data-dir", str(path), "store", "repair", "--accept-loss"])
    assert repaired.exit_code == 0, repaired.output
    with basaltmq.open(path, settings=QUIET) as db:
        rest: set[bytes] = set()
        for number in range(QUEUES):
            queue = db.queue(f"q{number}")
            messages = queue.lease(MESSAGES)
            queue.ack(messages)
            rest |= {message.payload for message in messages}
            assert queue.stats()["messages"] == MESSAGES - ACKED - len(messages)
    assert rest >= ready
    assert rest <= ready | leased


def test_a_prepared_branch_whose_lease_is_unreadable_commits_or_says_why(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with basaltmq.open(path, settings=QUIET) as db:
        queue = db.queue("orders")
        queue.enqueue([b"%d" % at for at in range(3)])
        xid = Xid(1, b"global", b"branch")
        with db.xa.begin(xid) as branch:
            branch.dequeue("orders", 1)
            branch.enqueue("orders", b"new")
        db.xa.prepare(xid)
    for table in (path / "kv").glob("*.sst"):
        if table_family(table)[0] == Family.LEASES.label:
            raw = bytearray(table.read_bytes())
            raw[10] ^= 4
            table.write_bytes(raw)
    with basaltmq.open(path, settings=QUIET) as db:
        assert db.xa.recover() == [xid]
        db.xa.decide(xid, commit=True)
        payloads = {message.payload for message in db.queue("orders").lease(10)}
        assert payloads >= {b"1", b"2", b"new"}, "nothing but the held message may be missing"
