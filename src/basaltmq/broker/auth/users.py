"""Users: who may come in, with which password, and what they are allowed to administer.

Objects of the node's catalog:

    user   name   ->   {"hash": see passwords.py, "tags": [...], "scram": {mechanism: see scram.py}}

Checking a password takes tens of milliseconds on purpose, so it is done in threads, a few at a time, and what was right
once is remembered under a key of this process: a thousand connections of one user cost one check. A name nobody has
takes as long as a wrong password, and failures delay what follows (see login_throttle.py).

Hashes leave this module only for definitions; passwords never.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from basaltmq.broker.auth import passwords
from basaltmq.broker.auth.login_throttle import LoginThrottle
from basaltmq.broker.auth.scram import ITERATIONS_MIN, ScramCredential, of_row
from basaltmq.broker.peer import Peer
from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.objects import CatalogObject
from basaltmq.errors import (
    AlreadyExistsError,
    AuthenticationError,
    InvalidArgumentError,
    TooManyLoginsError,
    UserNotFoundError,
)

ADMINISTRATOR: Final = "administrator"
MONITORING: Final = "monitoring"
POLICYMAKER: Final = "policymaker"
MANAGEMENT: Final = "management"

TAGS_MAX: Final = 64
CHECKS_AT_ONCE: Final = 4
"""Passwords checked at the same time: 16 MiB and a core each."""

CHECKS_WAITING_MAX: Final = 256
"""Passwords that wait to be checked: some 5 s of work for two cores; more logins are refused."""

REMEMBERED_MAX: Final = 4096
"""Right passwords remembered, by user."""

PAGE: Final = 500
SCRAM_SALT_BYTES: Final = 16


class User(msgspec.Struct, frozen=True):
    """Somebody who came in, or could."""

    name: str
    tags: tuple[str, ...] = ()
    has_password: bool = True
    is_anonymous: bool = False
    """It gave no credentials. It has this user's permissions and none of its tags."""

    @property
    def is_administrator(self) -> bool:
        return ADMINISTRATOR in self.tags


class Users:
    """The users of a node."""

    def __init__(
        self,
        catalog: Catalog,
        durable: Callable[[], Awaitable[None]],
        *,
        loopback_only: Callable[[], Iterable[str]] = lambda: ("guest",),
        anonymous_name: Callable[[], str] = lambda: "",
        random_bytes: Callable[[int], bytes] = os.urandom,
        throttle: LoginThrottle | None = None,
        secret: bytes | None = None,
    ) -> None:
        """`durable` waits for the sync of what was written to the catalog. `anonymous_name` is the user of clients
        without credentials; empty: there is none. `secret` is the node's: salts of unknown names come from it."""
        self._catalog = catalog
        self._durable = durable
        self._loopback_only = loopback_only
        self.anonymous_name = anonymous_name
        self.generation = 0
        """Counts changes of users: a login of an earlier generation has to be checked again."""
        self._random_bytes = random_bytes
        self._process_secret = random_bytes(32)
        self._node_secret = secret or random_bytes(32)
        self._iterations: dict[str, tuple[int, list[int]]] = {}
        self._remembered: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._nobody = passwords.unmatched(random_bytes)
        self._checks = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._checks_waiting = 0
        self.throttle = throttle or LoginThrottle()
        self.changed: Callable[[str], None] = lambda name: None
        """Called with the name of a user that was changed or deleted."""

    async def authenticate(self, name: str, password: str, peer: Peer) -> User:
        """The user of this name and password; AuthenticationError says no more than that it failed."""
        async with self.throttle.attempt(name, peer):
            found = self._find(name)
            stored = passwords.NONE if found is None else str(found.attributes.get("hash", passwords.NONE))
            if not await self._is_right(name, stored, password):
                raise AuthenticationError(f"user '{name}' was refused: the name or the password is wrong")
            assert found is not None, "nobody's password is never right"
            self._require_place(name, peer)
        if passwords.is_outdated(stored):
            await self._update(found, {"hash": await self._hash(password, None)})
        return _shown(found)

    def entering(self, name: str, peer: Peer) -> User:
        """The user of this name, who has shown elsewhere to be it."""
        found = self._find(name)
        if found is None:
            raise AuthenticationError(f"user '{name}' was refused: there is no such user")
        self._require_place(name, peer)
        return _shown(found)

    def anonymous(self, peer: Peer) -> User | None:
        """The user of a client without credentials: on loopback only, and without tags, so it administers nothing."""
        name = self.anonymous_name()
        if not name or not peer.is_loopback or self._find(name) is None:
            return None
        return User(name, has_password=False, is_anonymous=True)

    def is_administrator(self, user: User) -> bool:
        """Whether somebody who is logged in is an administrator at this moment."""
        if user.is_anonymous:
            return False
        found = self._find(user.name)
        return found is not None and _shown(found).is_administrator

    def _require_place(self, name: str, peer: Peer) -> None:
        if name in self._loopback_only() and not peer.is_loopback:
            raise AuthenticationError(f"user '{name}' can only connect via localhost")

    def scram_of(self, name: str, mechanism: str) -> ScramCredential | None:
        found = self._find(name)
        row = None if found is None else found.attributes.get("scram", {}).get(mechanism)
        return None if row is None else of_row(row)

    def scram_for(self, name: str, mechanism: str) -> tuple[ScramCredential, bool]:
        """A credential for any name, and whether it is somebody's: names are not told apart by what they get."""
        found = self.scram_of(name, mechanism)
        if found is not None:
            return found, True
        text = f"{mechanism} {name}".encode(errors="surrogatepass")
        made = hashlib.blake2b(text, key=self._node_secret, person=b"basalt-scram").digest()
        usual = self._usual_iterations(mechanism)
        iterations = usual[made[-1] % len(usual)]
        return ScramCredential(made[:SCRAM_SALT_BYTES], iterations, made, b""), False

    def _usual_iterations(self, mechanism: str) -> list[int]:
        """Those of users that have a credential: an unknown name has to show one of them."""
        known = self._iterations.get(mechanism)
        if known is None or known[0] != self.generation:
            rows = (
                each.attributes.get("scram", {}).get(mechanism)
                for each in self._catalog.page(Kind.USER, limit=PAGE).objects
            )
            found = sorted({int(row["iterations"]) for row in rows if row is not None})
            known = self._iterations[mechanism] = (self.generation, found or [ITERATIONS_MIN])
        return known[1]

    async def set_scram(self, name: str, mechanism: str, credential: ScramCredential | None) -> None:
        """Give or take the credential of a mechanism."""
        found = self._require(name)
        kept = dict(found.attributes.get("scram", {}))
        kept.pop(mechanism, None)
        if credential is not None:
            kept[mechanism] = credential.row()
        await self._update(found, {"scram": kept})

    async def _is_right(self, name: str, stored: str, password: str) -> bool:
        mark = hashlib.blake2b(
            password.encode(errors="replace"), key=self._process_secret, person=b"basalt-password"
        ).digest()
        known = self._remembered.get(name)
        if known == (stored, mark):
            self._remembered.move_to_end(name)
            return True
        if self._checks_waiting >= CHECKS_WAITING_MAX:
            raise TooManyLoginsError("too many passwords are being checked; try again in a second")
        # Unknown names are checked against a hash that nothing matches, so that they take as long as known ones.
        checked = self._nobody if stored == passwords.NONE else stored
        self._checks_waiting += 1
        try:
            async with self._checks:
                is_right = await asyncio.to_thread(passwords.verify, checked, password)
        finally:
            self._checks_waiting -= 1
        if not is_right or stored == passwords.NONE:
            return False
        self._remembered[name] = (stored, mark)
        while len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)
        return True

    def external(self, certificate: Mapping[str, Any], peer: Peer) -> User:
        """The user a client's certificate, checked by TLS, names: its common name."""
        for part in certificate.get("subject", ()):
            for field, value in part:
                if field == "commonName":
                    found = self._find(value)
                    if found is not None:
                        self._require_place(value, peer)
                        return _shown(found)
                    raise AuthenticationError(f"the certificate names user '{value}', who does not exist")
        raise AuthenticationError("the client's certificate has no common name to be a user's")

    def get(self, name: str) -> User:
        return _shown(self._require(name))

    def list(self) -> list[User]:
        return [_shown(each) for each in self._all()]

    def hash_of(self, name: str) -> str:
        """The hash, for the export of definitions to an administrator, and for nobody else."""
        return str(self._require(name).attributes.get("hash", passwords.NONE))

    async def create(
        self, name: str, password: str | None = None, *, tags: Iterable[str] = (), password_hash: str | None = None
    ) -> User:
        """Make a user. Without a password or hash nobody comes in by one."""
        if self._find(name) is not None:
            raise AlreadyExistsError(f"user {name!r} exists; change it instead")
        _check_name(name)
        attributes = {"hash": await self._hash(password, password_hash), "tags": _check_tags(tags)}
        self._catalog.create(Kind.USER, name, attributes=attributes)
        self.generation += 1
        await self._durable()
        return self.get(name)

    async def set_password(self, name: str, password: str | None, *, password_hash: str | None = None) -> None:
        stored = await self._hash(password, password_hash)
        found = self._require(name)
        # Who lost a password is not let in by what was made of it.
        await self._update(found, {"hash": stored, "scram": {}})

    async def set_tags(self, name: str, tags: Iterable[str]) -> None:
        await self._update(self._require(name), {"tags": _check_tags(tags)})

    async def delete(self, name: str) -> None:
        """Delete a user with all permissions."""
        self._catalog.delete(self._require(name).id)
        self._forget(name)
        await self._durable()

    async def _hash(self, password: str | None, password_hash: str | None) -> str:
        if password_hash is not None:
            if not passwords.is_hash(password_hash):
                raise InvalidArgumentError("the password hash is of no form that is known here")
            return password_hash
        if password is None:
            return passwords.NONE
        passwords.check_password(password)
        async with self._checks:
            return await asyncio.to_thread(passwords.hash_password, password, self._random_bytes)

    async def _update(self, found: CatalogObject, changes: dict[str, Any]) -> None:
        self._catalog.update(found.id, {**found.attributes, **changes})
        self._forget(found.name)
        await self._durable()

    def _forget(self, name: str) -> None:
        self._remembered.pop(name, None)
        self.generation += 1
        self.changed(name)

    def _find(self, name: str) -> CatalogObject | None:
        try:
            return self._catalog.find(Kind.USER, name)
        except InvalidArgumentError:
            return None

    def _require(self, name: str) -> CatalogObject:
        found = self._find(name)
        if found is None:
            raise UserNotFoundError(f"there is no user {name!r}")
        return found

    def _all(self) -> Iterable[CatalogObject]:
        after: str | None = None
        while True:
            page = self._catalog.page(Kind.USER, start_after=after, limit=PAGE)
            yield from page.objects
            if page.next_after is None:
                return
            after = page.next_after


def _shown(found: CatalogObject) -> User:
    tags = found.attributes.get("tags", [])
    return User(found.name, tuple(tags), found.attributes.get("hash", passwords.NONE) != passwords.NONE)


def _check_name(name: str) -> None:
    if not name or len(name.encode(errors="replace")) > 255:
        raise InvalidArgumentError("a user's name has 1 to 255 bytes")


def _check_tags(tags: Iterable[str]) -> list[str]:
    made = [str(tag).strip() for tag in tags]
    if len(made) > TAGS_MAX or not all(0 < len(tag) <= 255 for tag in made):
        raise InvalidArgumentError(f"a user has up to {TAGS_MAX} tags of 1 to 255 characters")
    return list(dict.fromkeys(made))
