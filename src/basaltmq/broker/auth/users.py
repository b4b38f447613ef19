"""Users: authentication, passwords, SCRAM credentials and tags.

Objects of the node's catalog:

    user   name   ->   {"hash": see passwords.py, "tags": [...], "scram": {mechanism: see scram.py},
                        "renewed": the outdated hash that a login has replaced}

A password check takes tens of milliseconds by design. Checks run in threads, a few at a time. A successful check is
cached under a key of this process. Equal checks at the same time share one computation, so 1000 connections of one user
cost one check. An unknown name takes as long as a wrong password, and failures delay later attempts
(login_throttle.py).

Hashes leave this module only for exported definitions. Passwords never do.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from basaltmq.broker.auth import passwords
from basaltmq.broker.auth.login_throttle import LoginThrottle
from basaltmq.broker.auth.scram import HASHES, ITERATIONS_MIN, ScramCredential, of_password, of_row
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
CHECKS_MAX: Final = 4
"""Maximum concurrent password checks. Each uses 16 MiB and one core."""

CHECKS_WAITING_MAX: Final = 256
"""Maximum queued password checks: about 5 s of work on two cores. Further logins are refused."""

REMEMBERED_MAX: Final = 4096
"""Maximum users with a cached successful password check."""

PAGE: Final = 500
SCRAM_SALT_BYTES: Final = 16
"""Length of a fake salt while no user has a SCRAM credential."""


class User(msgspec.Struct, frozen=True):
    """A user, authenticated or not."""

    name: str
    tags: tuple[str, ...] = ()
    has_password: bool = True
    is_anonymous: bool = False
    """The client sent no credentials. It has this user's permissions but none of its tags."""

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
        secret: bytes | None = None,
    ) -> None:
        """`durable` waits for the sync of catalog writes. `anonymous_name` is the user of clients without credentials,
        or empty. `secret` is the node secret, from which the salts of unknown names are derived."""
        self._catalog = catalog
        self._durable = durable
        self._loopback_only = loopback_only
        self.anonymous_name = anonymous_name
        self.generation = 0
        """Incremented by each change of a user. A login under an earlier generation must be checked again."""
        self._random_bytes = random_bytes
        self._process_secret = random_bytes(32)
        self._node_secret = secret or random_bytes(32)
        self._scram_in_use: dict[str, tuple[int, bool]] = {}
        self._forms: dict[str, tuple[int, list[tuple[int, int]]]] = {}
        self._remembered: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._dummy_hash = passwords.unmatched(random_bytes)
        self._checks = asyncio.Semaphore(CHECKS_MAX)
        self._running: dict[tuple[str, str, bytes], asyncio.Task[bool]] = {}
        """Password checks in progress or waiting, by name, stored hash and the keyed hash of the password."""
        self.throttle = LoginThrottle()
        self.changed: Callable[[str], None] = lambda name: None
        """Called with the name of a user that was changed or deleted."""

    async def authenticate(self, name: str, password: str, peer: Peer) -> User:
        """Return the user with this name and password. AuthenticationError does not say which of them is wrong."""
        async with self.throttle.attempt(name, peer):
            found = self._find(name)
            stored = passwords.NONE if found is None else str(found.attributes.get("hash", passwords.NONE))
            if not await self._is_password_right(name, stored, password):
                raise AuthenticationError(f"user '{name}' was refused: the name or the password is wrong")
            assert found is not None, "no password matches an unknown user"
            self._check_loopback(name, peer)
        if passwords.is_outdated(stored):
            await self._renew_hash(name, stored, password)
        return _user_of(found)

    async def _renew_hash(self, name: str, stored: str, password: str) -> None:
        """Replace an outdated hash, unless the user was changed while the new one was computed."""
        renewed = await self._hash(password, None)
        found = self._find(name)
        if found is not None and found.attributes.get("hash") == stored:
            await self._update(found, {"hash": renewed, "renewed": stored})

    def authenticated_user(self, name: str, peer: Peer) -> User:
        """Return the user of this name. The caller has authenticated the client by other means."""
        found = self._find(name)
        if found is None:
            raise AuthenticationError(f"user '{name}' was refused: it does not exist")
        self._check_loopback(name, peer)
        return _user_of(found)

    def anonymous(self, peer: Peer) -> User | None:
        """Return the user of a local client without credentials, without its tags; None if it is not allowed."""
        name = self.anonymous_name()
        if not name or not peer.is_loopback or self._find(name) is None:
            return None
        return User(name, has_password=False, is_anonymous=True)

    def access_secret(self, name: str) -> str | None:
        """Return the secret of the access key that has the user's name; None if there is no such user.

        The secret follows from the node's secret and the password hash, so a new password revokes it.
        """
        found = self._find(name)
        if found is None:
            return None
        stored = found.attributes.get("renewed") or found.attributes.get("hash", passwords.NONE)
        text = f"{name}\0{stored}".encode(errors="surrogatepass")
        made = hashlib.blake2b(text, key=self._node_secret, digest_size=24, person=b"basalt-access")
        return base64.urlsafe_b64encode(made.digest()).decode()

    def with_access_key(self, name: str, peer: Peer) -> User:
        """Return the user of an access key whose signature was verified."""
        found = self._require(name)
        self._check_loopback(name, peer)
        return _user_of(found)

    def is_administrator(self, user: User) -> bool:
        """Whether a user is an administrator now, which may have changed since login."""
        if user.is_anonymous:
            return False
        found = self._find(user.name)
        return found is not None and _user_of(found).is_administrator

    def _check_loopback(self, name: str, peer: Peer) -> None:
        if name in self._loopback_only() and not peer.is_loopback:
            raise AuthenticationError(f"user '{name}' can only connect via localhost")

    def scram_of(self, name: str, mechanism: str) -> ScramCredential | None:
        found = self._find(name)
        row = None if found is None else found.attributes.get("scram", {}).get(mechanism)
        return None if row is None else of_row(row)

    def scram_for(self, name: str, mechanism: str) -> tuple[ScramCredential, bool]:
        """Return a credential and whether it is real. An unknown name gets a fake one, which does not reveal that."""
        found = self.scram_of(name, mechanism)
        if found is not None:
            return found, True
        text = f"{mechanism} {name}".encode(errors="surrogatepass")
        made = hashlib.blake2b(text, key=self._node_secret, person=b"basalt-scram").digest()
        usual = self._known_forms(mechanism)
        salt_bytes, iterations = usual[made[-1] % len(usual)]
        salt = hashlib.shake_256(made).digest(salt_bytes)
        return ScramCredential(salt, iterations, made, b""), False

    def has_scram(self, mechanism: str) -> bool:
        """Whether a user has a credential for this mechanism."""
        known = self._scram_in_use.get(mechanism)
        if known is None or known[0] != self.generation:
            is_used = any(user.attributes.get("scram", {}).get(mechanism) for user in self._all())
            known = self._scram_in_use[mechanism] = (self.generation, is_used)
        return known[1]

    def _known_forms(self, mechanism: str) -> list[tuple[int, int]]:
        """Return the salt lengths and iteration counts of real credentials. A fake credential uses one pair of them.

        Clients choose both: kafka-configs.sh sends salts of 25 bytes, librdkafka of 64.
        """
        known = self._forms.get(mechanism)
        if known is None or known[0] != self.generation:
            rows = (
                each.attributes.get("scram", {}).get(mechanism)
                for each in self._catalog.page(Kind.USER, limit=PAGE).objects
            )
            real = [of_row(row) for row in rows if row is not None]
            found = sorted({(len(each.salt), each.iterations) for each in real})
            known = self._forms[mechanism] = (self.generation, found or [(SCRAM_SALT_BYTES, ITERATIONS_MIN)])
        return known[1]

    async def set_scram(self, name: str, mechanism: str, credential: ScramCredential | None) -> None:
        """Set the credential of a mechanism, or remove it with None."""
        found = self._require(name)
        kept = dict(found.attributes.get("scram", {}))
        kept.pop(mechanism, None)
        if credential is not None:
            kept[mechanism] = credential.row()
        await self._update(found, {"scram": kept})

    async def set_scram_password(self, name: str, mechanism: str, password: str) -> None:
        """Set the credential of a mechanism from a password."""
        if mechanism not in HASHES:
            raise InvalidArgumentError(f"unknown SCRAM mechanism {mechanism!r:.80}; use {' or '.join(HASHES)}")
        passwords.check_password(password)
        salt = self._random_bytes(SCRAM_SALT_BYTES)
        await self.set_scram(name, mechanism, await asyncio.to_thread(of_password, mechanism, password, salt))

    async def _is_password_right(self, name: str, stored: str, password: str) -> bool:
        mark = hashlib.blake2b(
            password.encode(errors="replace"), key=self._process_secret, person=b"basalt-password"
        ).digest()
        known = self._remembered.get(name)
        if known == (stored, mark):
            self._remembered.move_to_end(name)
            return True
        # Equal checks of one user share one computation. So a restart, after which many hosts log in as one user, costs
        # one check.
        key = (name, stored, mark)
        check = self._running.get(key)
        if check is None:
            if len(self._running) >= CHECKS_WAITING_MAX:
                raise TooManyLoginsError("too many logins at once; try again in a second")
            check = self._running[key] = asyncio.create_task(self._verify(stored, password))
            check.add_done_callback(lambda _: self._running.pop(key))
        # A login that ends early must not end the check of the others.
        is_right = await asyncio.shield(check)
        if not is_right or stored == passwords.NONE:
            return False
        self._remembered[name] = (stored, mark)
        while len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)
        return True

    async def _verify(self, stored: str, password: str) -> bool:
        # Unknown names are checked against a hash that nothing matches, so they take as long as known ones.
        checked = self._dummy_hash if stored == passwords.NONE else stored
        async with self._checks:
            return await asyncio.to_thread(passwords.verify, checked, password)

    def external(self, certificate: Mapping[str, Any], peer: Peer) -> User:
        """Return the user named by the common name of a client certificate that TLS has verified."""
        for part in certificate.get("subject", ()):
            for field, value in part:
                if field == "commonName":
                    found = self._find(value)
                    if found is not None:
                        self._check_loopback(value, peer)
                        return _user_of(found)
                    raise AuthenticationError(f"the client certificate names user '{value}', which does not exist")
        raise AuthenticationError("the client certificate has no common name; it must be the name of a user")

    def accepts(self, certificate: Mapping[str, Any], peer: Peer) -> bool:
        """Whether `external` would accept a client certificate. Clients prefer EXTERNAL over their password."""
        try:
            self.external(certificate, peer)
        except AuthenticationError:
            return False
        return True

    def get(self, name: str) -> User:
        return _user_of(self._require(name))

    def list(self) -> list[User]:
        return [_user_of(each) for each in self._all()]

    def hash_of(self, name: str) -> str:
        """Return the password hash. Use it only to export definitions to an administrator."""
        return str(self._require(name).attributes.get("hash", passwords.NONE))

    async def create(
        self, name: str, password: str | None = None, *, tags: Iterable[str] = (), password_hash: str | None = None
    ) -> User:
        """Create a user. Without a password or hash, it cannot log in with a password."""
        if self._find(name) is not None:
            raise AlreadyExistsError(f"user {name!r} already exists; change it instead")
        _check_name(name)
        attributes = {"hash": await self._hash(password, password_hash), "tags": _check_tags(tags)}
        self._catalog.create(Kind.USER, name, attributes=attributes)
        self.generation += 1
        await self._durable()
        return self.get(name)

    async def set_password(self, name: str, password: str | None, *, password_hash: str | None = None) -> None:
        stored = await self._hash(password, password_hash)
        found = self._require(name)
        # Credentials derived from the old password must not remain valid.
        await self._update(found, {"hash": stored, "renewed": "", "scram": {}})

    async def set_tags(self, name: str, tags: Iterable[str]) -> None:
        await self._update(self._require(name), {"tags": _check_tags(tags)})

    async def delete(self, name: str) -> None:
        """Delete a user and its permissions."""
        self._catalog.delete(self._require(name).id)
        self._forget(name)
        await self._durable()

    async def _hash(self, password: str | None, password_hash: str | None) -> str:
        if password_hash is not None:
            if not passwords.is_hash(password_hash):
                raise InvalidArgumentError("the password hash has an unknown format; set a password instead")
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
            raise UserNotFoundError(f"user {name!r} not found")
        return found

    def _all(self) -> Iterable[CatalogObject]:
        after: str | None = None
        while True:
            page = self._catalog.page(Kind.USER, start_after=after, limit=PAGE)
            yield from page.objects
            if page.next_after is None:
                return
            after = page.next_after


def _user_of(found: CatalogObject) -> User:
    tags = found.attributes.get("tags", [])
    return User(found.name, tuple(tags), found.attributes.get("hash", passwords.NONE) != passwords.NONE)


def _check_name(name: str) -> None:
    if not name or len(name.encode(errors="replace")) > 255:
        raise InvalidArgumentError("invalid user name: it must have 1 to 255 bytes")


def _check_tags(tags: Iterable[str]) -> list[str]:
    made = [str(tag).strip() for tag in tags]
    if len(made) > TAGS_MAX or not all(0 < len(tag) <= 255 for tag in made):
        raise InvalidArgumentError(f"invalid tags: a user has at most {TAGS_MAX} tags of 1 to 255 characters")
    return list(dict.fromkeys(made))
