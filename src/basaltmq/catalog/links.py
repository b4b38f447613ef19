"""The link store (SPEC A8): durable AMQP 1.0 links with source and target.

    amqp_1_0_links    | lp(remote container) | lp(link name) | role u8 |  ->

                      | version u8 = 2 | u32 size | source | u32 size | target |

Source and target are encoded AMQP values and opaque here. The version of all entries is in `version` under
`amqp_1_0_links_version`. The byte in each entry detects rows that were written separately. Version 1 had u16 sizes,
which are too small for large filter sets or property maps. Opening rewrites entries of an older version in one batch
and refuses a newer version.

`open_and_load` reports damaged entries and leaves them unchanged.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Final

import msgspec

from basaltmq.catalog.commits import Commits
from basaltmq.catalog.faults import Fault, FaultKind, LoadReport
from basaltmq.catalog.lifecycle import Lifecycle
from basaltmq.errors import CorruptionError, InvalidArgumentError, LimitExceededError
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import catalog as catalog_keys
from basaltmq.store.versions import bring_up_to_date

VERSION_NAME: Final = "amqp_1_0_links_version"
VERSION: Final = 2

TERMINUS_BYTES_MAX: Final = 1 << 20
"""Size limit of an encoded source or target. A filter set with a long selector is much smaller."""

_SIZES: Final = {1: Struct(">H"), 2: Struct(">I")}
"""Size field of source and target, by entry version."""

_END: Final = b"\xff" * 4
"""Above every key: two length bytes, then UTF-8, which never contains 0xff."""


class Role(enum.IntEnum):
    """The role of this container on the link, with AMQP's values."""

    SENDER = 0
    RECEIVER = 1


class Link(msgspec.Struct, frozen=True):
    """A durable link."""

    remote_container: str
    name: str
    role: Role
    source: bytes
    target: bytes


LinkHandler = Callable[[Link], bool | None]
"""Called with every link. Returning False stops the scan."""


class LinkStore:
    """Durable links over a store."""

    def __init__(self, store: Store, commits: Commits | None = None) -> None:
        self.commits = commits or Commits(store)
        self._store = store
        self._life = Lifecycle("link store")

    def open_and_load(self, handler: LinkHandler) -> LoadReport:
        """Open, upgrade older entries, and call `handler` with every sound link. The report lists damaged entries."""
        self._life.open()
        try:
            with self.commits.lock:
                bring_up_to_date(self._store, VERSION_NAME, VERSION, {1: _upgrade_from_1}, (Family.AMQP_1_0_LINKS,))
            return self._load(handler)
        except BaseException:
            self._life.close()
            raise

    def save_link(self, link: Link) -> None:
        """Create a link, or replace its source and target."""
        self._life.require_open()
        with self.commits.change() as change:
            change.put(*row_of(link))

    def delete_link(self, link: Link) -> None:
        """Delete a link. A missing link is not an error, because a peer may detach twice."""
        self._life.require_open()
        with self.commits.change() as change:
            change.delete(Family.AMQP_1_0_LINKS, _key(link))

    def close(self) -> None:
        """Close. Closing twice is allowed. The underlying store stays open."""
        self._life.close()

    def delete(self) -> None:
        """Delete all links and close. The next open finds a new store."""
        with self.commits.change() as change:
            change.delete_range(Family.AMQP_1_0_LINKS, b"", _END)
            change.delete(Family.VERSION, VERSION_NAME.encode())
        self._life.close()

    def _load(self, handler: LinkHandler) -> LoadReport:
        report = LoadReport()
        for key, raw in self._store.scan(Family.AMQP_1_0_LINKS):
            try:
                link = decode_link(key, raw)
            except CorruptionError as error:
                report.add(Fault(FaultKind.DAMAGED_ROW, str(error)))
                continue
            report.visited += 1
            if handler(link) is False:
                break
        return report


def row_of(link: Link) -> tuple[Family, bytes, bytes]:
    """Return the row of a link, for a caller that writes it with other rows. It takes effect at the next open."""
    return Family.AMQP_1_0_LINKS, _key(link), encode_link(link)


def deleted_row(link: Link) -> tuple[Family, bytes, None]:
    """Return the deletion of a link's row."""
    return Family.AMQP_1_0_LINKS, _key(link), None


def encode_link(link: Link) -> bytes:
    size = _SIZES[VERSION]
    for part, raw in (("source", link.source), ("target", link.target)):
        if not isinstance(raw, bytes):
            raise InvalidArgumentError(f"the {part} of link {link.name!r:.80} must be bytes, encoded as AMQP")
        if len(raw) > TERMINUS_BYTES_MAX:
            raise LimitExceededError(
                f"the {part} of link {link.name!r:.80} takes {len(raw)} bytes; the limit is {TERMINUS_BYTES_MAX}"
            )
    return b"".join(
        (bytes((VERSION,)), size.pack(len(link.source)), link.source, size.pack(len(link.target)), link.target)
    )


def decode_link(key: bytes, raw: bytes, version: int = VERSION) -> Link:
    container, name, role = catalog_keys.decode_link_key(key)
    what = f"link {name!r:.80} of container {container!r:.80}"
    if role not in (Role.SENDER, Role.RECEIVER):
        raise CorruptionError(f"{what} has the unknown role {role}")
    if not raw or raw[0] != version:
        found = raw[0] if raw else "missing"
        raise CorruptionError(f"{what} is damaged: its version is {found} in a store of version {version}")
    source, at = _take(raw, 1, _SIZES[version], what)
    target, at = _take(raw, at, _SIZES[version], what)
    if at != len(raw):
        raise CorruptionError(f"{what} is damaged: {len(raw) - at} bytes too many")
    return Link(container, name, Role(role), source, target)


def _take(raw: bytes, at: int, size: Struct, what: str) -> tuple[bytes, int]:
    begin = at + size.size
    end = begin + (size.unpack_from(raw, at)[0] if begin <= len(raw) else 0)
    if end > len(raw):
        raise CorruptionError(f"{what} is damaged: it ends after {len(raw)} bytes, {end} are needed")
    return raw[begin:end], end


def _key(link: Link) -> bytes:
    if not isinstance(link, Link) or not isinstance(link.remote_container, str) or not isinstance(link.name, str):
        raise InvalidArgumentError("a link must be a Link with texts as container and name")
    if link.role not in (Role.SENDER, Role.RECEIVER):
        raise InvalidArgumentError(f"the role of link {link.name!r:.80} must be sender or receiver, not {link.role!r}")
    try:
        return catalog_keys.link_key(link.remote_container, link.name, link.role)
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"container and name of a link must be valid Unicode: {link.name!a:.80}") from None


def _upgrade_from_1(store: Store) -> Iterator[Batch]:
    """Yield one batch, so that all entries have the same version at any time."""
    batch = Batch()
    for key, raw in store.scan(Family.AMQP_1_0_LINKS):
        try:
            link = decode_link(key, raw, version=1)
        except CorruptionError:
            continue
        batch.put(Family.AMQP_1_0_LINKS, key, encode_link(link))
    yield batch
