"""Users, their passwords and permissions."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.broker.auth import passwords
from basaltmq.broker.auth import users as users_module
from basaltmq.broker.auth.permissions import Permissions
from basaltmq.broker.auth.scram import SHA_256, ScramCredential
from basaltmq.broker.auth.users import User, Users
from basaltmq.broker.peer import Peer
from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.kinds import Kind
from basaltmq.errors import (
    AccessRefusedError,
    AlreadyExistsError,
    AuthenticationError,
    InvalidArgumentError,
    NotFoundError,
    TooManyLoginsError,
    UserNotFoundError,
)
from basaltmq.store.memory import MemoryStore

HERE = Peer("127.0.0.1", is_loopback=True)
THERE = Peer("192.0.2.1", is_loopback=False)
ROW = {"salt": "c2FsdA==", "iterations": 4096, "stored_key": "", "server_key": ""}


async def at_once() -> None:
    """Return at once, because the store is in memory."""


def with_users(test: Callable[[Users, Permissions], Awaitable[None]], store: MemoryStore | None = None) -> None:
    async def whole() -> None:
        catalog = Catalog(store or MemoryStore())
        catalog.open()
        users, permissions = Users(catalog, at_once, anonymous_name=lambda: "guest"), Permissions(catalog, at_once)
        users.changed = lambda name: permissions.forget()
        await test(users, permissions)
        catalog.close()

    asyncio.run(whole())


def rabbit(password: str, algorithm: str = "sha256") -> str:
    salt = b"\x01\x02\x03\x04"
    return base64.b64encode(salt + hashlib.new(algorithm, salt + password.encode()).digest()).decode()


def test_a_hash_is_salted_and_matches_only_its_password() -> None:
    first, second = passwords.hash_password("secret"), passwords.hash_password("secret")
    assert first != second
    assert "secret" not in first
    assert passwords.verify(first, "secret")
    assert not passwords.verify(first, "Secret")
    assert not passwords.verify(first, "")
    assert not passwords.is_outdated(first)


@given(st.text(max_size=60), st.text(max_size=10))
def test_an_invalid_hash_matches_no_password(stored: str, password: str) -> None:
    assert not passwords.verify(stored, password) or stored.startswith("scrypt$")


@pytest.mark.parametrize("password", ["", "x" * 2000, None, "\ud800"])
def test_invalid_passwords_are_refused(password: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="password"):
        passwords.hash_password(password)


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_hashes_of_rabbitmq_are_imported_and_replaced_at_login(algorithm: str) -> None:
    async def test(users: Users, permissions: Permissions) -> None:
        taken = passwords.rabbit_hash(f"rabbit_password_hashing_{algorithm}", rabbit("hop", algorithm))
        await users.create("rabbit", password_hash=taken)
        with pytest.raises(AuthenticationError):
            await users.authenticate("rabbit", "hup", HERE)
        assert users.hash_of("rabbit") == taken
        assert (await users.authenticate("rabbit", "hop", HERE)).name == "rabbit"
        assert users.hash_of("rabbit").startswith("scrypt$")
        await users.authenticate("rabbit", "hop", HERE)

    with_users(test)


def test_the_secret_of_an_access_key_changes_with_the_password_and_not_with_its_hash() -> None:
    async def test(users: Users, permissions: Permissions) -> None:
        taken = passwords.rabbit_hash("rabbit_password_hashing_sha256", rabbit("hop"))
        await users.create("rabbit", password_hash=taken)
        secret = users.access_secret("rabbit")
        await users.authenticate("rabbit", "hop", HERE)
        assert users.hash_of("rabbit") != taken
        assert users.access_secret("rabbit") == secret
        await users.set_tags("rabbit", ["management"])
        assert users.access_secret("rabbit") == secret
        await users.set_password("rabbit", "hop")
        assert users.access_secret("rabbit") != secret

    with_users(test)


@pytest.mark.parametrize("change", ["password", "tags", "deleted"])
def test_renewing_a_hash_at_login_keeps_concurrent_changes(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(users: Users, permissions: Permissions) -> None:
        taken = passwords.rabbit_hash("rabbit_password_hashing_sha256", rabbit("hop"))
        await users.create("rabbit", password_hash=taken, tags=["administrator"])
        hash_of = users._hash

        async def hash_slowly(password: str | None, password_hash: str | None) -> str:
            monkeypatch.setattr(users, "_hash", hash_of)
            if change == "password":
                await users.set_password("rabbit", "new")
            elif change == "tags":
                await users.set_tags("rabbit", [])
            else:
                await users.delete("rabbit")
            return await hash_of(password, password_hash)

        monkeypatch.setattr(users, "_hash", hash_slowly)
        await users.authenticate("rabbit", "hop", HERE)
        if change == "deleted":
            assert users.list() == []
        elif change == "tags":
            assert users.get("rabbit").tags == ()
            assert users.hash_of("rabbit").startswith("scrypt$")
        else:
            with pytest.raises(AuthenticationError):
                await users.authenticate("rabbit", "hop", HERE)

    with_users(test)


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        ("rabbit_password_hashing_md5", "AAAA"),
        ("rabbit_password_hashing_sha256", "!"),
        ("", base64.b64encode(b"x").decode()),
    ],
)
def test_unsupported_hashes_are_refused(algorithm: str, text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        passwords.rabbit_hash(algorithm, text)


def test_failed_logins_do_not_reveal_their_reason() -> None:
    async def test(users: Users, permissions: Permissions) -> None:
        await users.create("ann", "right", tags=["monitoring", "monitoring"])
        await users.create("keyless")
        user = await users.authenticate("ann", "right", THERE)
        assert (user.name, user.tags, user.is_administrator) == ("ann", ("monitoring",), False)
        said = set()
        for name, password in (("ann", "wrong"), ("nobody", "right"), ("keyless", ""), ("keyless", "-"), ("", "")):
            with pytest.raises(AuthenticationError) as refusal:
                await users.authenticate(name, password, HERE)
            said.add(str(refusal.value).replace(f"'{name}'", "?"))
        assert len(said) == 1
        with pytest.raises(AlreadyExistsError):
            await users.create("ann", "other")

    with_users(test)


def test_password_changes_and_deletions_take_effect_immediately() -> None:
    async def test(users: Users, permissions: Permissions) -> None:
        await users.create("ann", "old")
        await users.authenticate("ann", "old", HERE)
        await users.set_password("ann", "new")
        with pytest.raises(AuthenticationError):
            await users.authenticate("ann", "old", HERE)
        await users.authenticate("ann", "new", HERE)
        await users.set_password("ann", None)
        with pytest.raises(AuthenticationError):
            await users.authenticate("ann", "new", HERE)
        await users.delete("ann")
        with pytest.raises(UserNotFoundError):
            users.get("ann")

    with_users(test)


def test_guest_may_log_in_only_from_loopback() -> None:
    async def test(users: Users, permissions: Permissions) -> None:
        await users.create("guest", "guest")
        await users.authenticate("guest", "guest", HERE)
        with pytest.raises(AuthenticationError, match="can only connect via localhost"):
            await users.authenticate("guest", "guest", THERE)

    with_users(test)


def test_a_password_is_checked_once_for_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []
    verify = passwords.verify

    def counted(stored: str, password: str) -> bool:
        checks.append(password)
        return verify(stored, password)

    async def test(users: Users, permissions: Permissions) -> None:
        await users.create("ann", "right")
        monkeypatch.setattr(passwords, "verify", counted)
        for _ in range(100):
            await users.authenticate("ann", "right", HERE)
        assert checks == ["right"]
        for _ in range(2):
            with pytest.raises(AuthenticationError):
                await users.authenticate("ann", "wrong", HERE)
        assert checks == ["right", "wrong", "wrong"]

    with_users(test)


def test_a_certificate_names_its_user() -> None:
    async def test(users: Users, permissions: Permissions) -> None:
        await users.create("ann")
        subject = ((("organizationName", "o"),), (("commonName", "ann"),))
        assert users.external({"subject": subject}, THERE).name == "ann"
        for wrong in ({}, {"subject": ((("commonName", "bob"),),)}, {"subject": ((("organizationName", "ann"),),)}):
            with pytest.raises(AuthenticationError):
                users.external(wrong, HERE)

    with_users(test)


@pytest.mark.parametrize("case", ["scrypt", "rabbit-sha256", "rabbit-sha512", "no password", "damaged", "unknown"])
def test_every_wrong_login_costs_one_scrypt(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cheaper check in some cases would reveal which names exist and how their passwords are stored."""
    costs: list[int] = []
    scrypt = hashlib.scrypt

    def counted(*arguments: Any, **options: Any) -> bytes:
        costs.append(options["n"] * options["r"] * options["p"])
        return scrypt(*arguments, **options)

    async def test(users: Users, permissions: Permissions) -> None:
        hashes = {
            "rabbit-sha256": f"rabbit-sha256${rabbit('right')}",
            "rabbit-sha512": f"rabbit-sha512${rabbit('right', 'sha512')}",
            "no password": passwords.NONE,
            "damaged": "scrypt$what",
        }
        if case == "scrypt":
            await users.create("ann", "right")
        elif case != "unknown":
            await users.create("ann", password_hash=hashes[case])
        monkeypatch.setattr(hashlib, "scrypt", counted)
        with pytest.raises(AuthenticationError):
            await users.authenticate("ann", "wrong", HERE)
        assert costs == [(1 << passwords.LOG2_N) * passwords.R * passwords.P]

    with_users(test)


def test_logins_beyond_what_can_be_checked_soon_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_module, "CHECKS_WAITING_MAX", 2)

    async def test(users: Users, permissions: Permissions) -> None:
        guesses = [users.authenticate(f"user-{number}", "x", THERE) for number in range(8)]
        done = await asyncio.gather(*guesses, return_exceptions=True)
        assert sum(isinstance(each, TooManyLoginsError) for each in done) == 6

    with_users(test)


def test_many_hosts_that_log_in_as_one_user_share_one_password_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_module, "CHECKS_WAITING_MAX", 2)
    checks: list[str] = []
    verify = passwords.verify

    def counted(stored: str, password: str) -> bool:
        checks.append(password)
        return verify(stored, password)

    async def test(users: Users, permissions: Permissions) -> None:
        await users.create("ann", "right")
        monkeypatch.setattr(passwords, "verify", counted)
        hosts = [Peer(f"192.0.2.{number}", is_loopback=False) for number in range(20)]
        logins = [asyncio.ensure_future(users.authenticate("ann", "right", host)) for host in hosts]
        guesses = [asyncio.ensure_future(users.authenticate("ann", "wrong", host)) for host in hosts[:3]]
        await asyncio.sleep(0)
        # The login that started the check ends early. The others keep waiting for it.
        logins[0].cancel()
        done = await asyncio.gather(*logins, *guesses, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError)
        assert [each.name for each in done[1:20] if isinstance(each, User)] == ["ann"] * 19
        assert [type(each) for each in done[20:]] == [AuthenticationError] * 3
        assert checks.count("right") == 1
        # A check that is over is not shared: every later wrong password is checked.
        before = checks.count("wrong")
        with pytest.raises(AuthenticationError):
            await users.authenticate("ann", "wrong", hosts[19])
        assert checks.count("wrong") == before + 1

    with_users(test)


def test_scram_of_an_unknown_user_looks_like_that_of_a_known_one_also_after_restarts() -> None:
    store = MemoryStore()

    def seen(secret: bytes) -> ScramCredential:
        async def whole() -> ScramCredential:
            catalog = Catalog(store)
            if catalog.open():
                catalog.create(Kind.USER, "ann", attributes={"scram": {SHA_256: {**ROW, "iterations": 8192}}})
            found, is_somebody = Users(catalog, at_once, secret=secret).scram_for("nobody", SHA_256)
            assert not is_somebody
            catalog.close()
            return found

        return asyncio.run(whole())

    first = seen(b"s" * 32)
    assert first == seen(b"s" * 32)
    assert first.iterations == 8192, "as the users there are"
    assert len(first.salt) == len(b"salt"), "clients choose the length of a salt, so it tells real users from others"
    assert first.salt != seen(b"t" * 32).salt


def test_a_certificate_of_a_loopback_user_is_refused_from_elsewhere() -> None:
    async def test(users: Users, permissions: Permissions) -> None:
        await users.create("guest", "guest")
        certificate = {"subject": ((("commonName", "guest"),),)}
        assert users.external(certificate, HERE).name == "guest"
        with pytest.raises(AuthenticationError, match="can only connect via localhost"):
            users.external(certificate, THERE)

    with_users(test)


@pytest.mark.promise("P14")
def test_the_anonymous_user_exists_on_loopback_only_and_has_no_tags() -> None:
    async def test(users: Users, permissions: Permissions) -> None:
        assert users.anonymous(HERE) is None, "there is no guest yet"
        await users.create("guest", "guest", tags=["administrator"])
        assert users.anonymous(THERE) is None
        found = users.anonymous(HERE)
        assert found is not None
        assert (found.name, found.tags, found.is_administrator) == ("guest", (), False)
        assert not users.is_administrator(found)
        guest = await users.authenticate("guest", "guest", HERE)
        assert users.is_administrator(guest)
        await users.set_tags("guest", [])
        assert not users.is_administrator(guest), "at this moment, not at the login"
        users.anonymous_name = lambda: ""
        assert users.anonymous(HERE) is None

    with_users(test)


def test_permissions_match_names_by_patterns() -> None:
    async def test(users: Users, permissions: Permissions) -> None:
        await users.create("ann", "x")
        ann = User("ann")
        with pytest.raises(AccessRefusedError, match="access to vhost '/' refused for user 'ann'"):
            permissions.check_vhost(ann, "/")
        await permissions.set("ann", "/", configure="", write="^orders", read=".*")
        permissions.check_vhost(ann, "/")
        permissions.check(ann, "/", "write", "orders.new")
        permissions.check(ann, "/", "read", "")
        for kind, name in (("write", "new.orders"), ("configure", "orders"), ("write", "")):
            with pytest.raises(AccessRefusedError, match=f"{kind} access"):
                permissions.check(ann, "/", kind, name)
        with pytest.raises(AccessRefusedError):
            permissions.check(ann, "other", "read", "q")
        await permissions.set("ann", "/", configure="", write="^amq.default$", read="^$")
        permissions.check(ann, "/", "write", "")
        with pytest.raises(AccessRefusedError):
            permissions.check(ann, "/", "read", "q")
        with pytest.raises(InvalidArgumentError):
            await permissions.set("ann", "/", configure="(", write="", read="")
        with pytest.raises(UserNotFoundError):
            await permissions.set("nobody", "/", configure="", write="", read="")
        await permissions.clear("ann", "/")
        with pytest.raises(AccessRefusedError):
            permissions.check_vhost(ann, "/")
        with pytest.raises(NotFoundError):
            await permissions.clear("ann", "/")

    with_users(test)


def test_a_stored_permission_with_unsupported_syntax_denies_and_the_rest_works() -> None:
    store = MemoryStore()

    async def before(users: Users, permissions: Permissions) -> None:
        await users.create("ann", "x")
        await permissions.set("ann", "/", configure="STORED", write=".*", read=".*")
        with pytest.raises(InvalidArgumentError, match="not supported"):
            await permissions.set("ann", "/", configure="^(?!amq).*", write=".*", read=".*")

    def as_an_earlier_version_stored_it() -> None:
        catalog = Catalog(store)
        catalog.open()
        user = catalog.find(Kind.USER, "ann")
        assert user is not None
        row = catalog.find(Kind.PERMISSION, "/", user.id)
        assert row is not None
        catalog.update(row.id, {**row.attributes, "configure": "^(?!amq).*"})
        catalog.close()

    async def after(users: Users, permissions: Permissions) -> None:
        ann = User("ann")
        with pytest.raises(AccessRefusedError):
            permissions.check(ann, "/", "configure", "orders")
        permissions.check(ann, "/", "write", "orders")

    with_users(before, store)
    as_an_earlier_version_stored_it()
    with_users(after, store)


def test_topic_permissions_are_checked_in_addition() -> None:
    async def test(users: Users, permissions: Permissions) -> None:
        await users.create("a.n", "x")
        user = User("a.n")
        await permissions.set("a.n", "/", configure=".*", write=".*", read=".*")
        permissions.check_topic(user, "/", "amq.topic", "write", "anything")
        await permissions.set_topic("a.n", "/", "amq.topic", write="^{username}\\.", read="")
        permissions.check_topic(user, "/", "amq.topic", "write", "a.n.x")
        permissions.check_topic(user, "/", "other", "write", "anything")
        for kind, key in (("write", "axn.x"), ("write", "b.x"), ("read", "a.n.x")):
            with pytest.raises(AccessRefusedError, match="topic"):
                permissions.check_topic(user, "/", "amq.topic", kind, key)
        assert [each.exchange for each in permissions.list_topics()] == ["amq.topic"]
        await permissions.clear_topic("a.n", "/")
        permissions.check_topic(user, "/", "amq.topic", "write", "b.x")

    with_users(test)


def test_users_survive_a_restart_and_permissions_of_deleted_users_do_not() -> None:
    store = MemoryStore()

    async def before(users: Users, permissions: Permissions) -> None:
        await users.create("ann", "x", tags=["administrator"])
        await users.create("bob", "x")
        for name in ("ann", "bob"):
            await permissions.set(name, "/", configure="c", write="w", read="r")
        await users.delete("bob")

    async def after(users: Users, permissions: Permissions) -> None:
        assert [each.name for each in users.list()] == ["ann"]
        assert (await users.authenticate("ann", "x", THERE)).is_administrator
        await users.create("bob", "y")
        assert [(each.user, each.vhost, each.write) for each in permissions.list()] == [("ann", "/", "w")]
        assert not permissions.may_use("bob", "/")

    with_users(before, store)
    with_users(after, store)


def test_descriptions_of_users_contain_no_secret() -> None:
    async def test(users: Users, permissions: Permissions) -> None:
        await users.create("ann", "hush")
        shown = repr(users.get("ann")) + repr(users.list())
        assert "hush" not in shown
        assert "scrypt" not in shown

    with_users(test)
