"""API keys: hashed at rest, patterns, expiry, and rows that cannot be read."""

from __future__ import annotations

import asyncio
import base64
import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basaltmq.broker.auth.login_throttle import LoginThrottle
from basaltmq.broker.auth.permissions import Permissions
from basaltmq.broker.auth.users import Users
from basaltmq.catalog.catalog import Catalog
from basaltmq.errors import (
    AccessRefusedError,
    AuthenticationError,
    CorruptionError,
    InvalidArgumentError,
    LimitExceededError,
    NotFoundError,
)
from basaltmq.protocols.grpc.services.access import Access, AccessMode, Accounts, Caller, peer_of
from basaltmq.protocols.grpc.services.api_keys import KINDS, PERMISSIONS_MAX, ApiKeys, matches
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys.broker import api_key_key, decode_api_key_key
from basaltmq.store.memory import MemoryStore

REMOTE = "ipv4:10.1.2.3:4711"
LOCAL = "ipv4:127.0.0.1:4711"


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms * 1_000_000


@given(st.text("ab*", max_size=8), st.text("ab", max_size=10))
def test_patterns_match_as_documented(pattern: str, name: str) -> None:
    assert matches(pattern, name) == fnmatch.fnmatchcase(name, pattern)


@pytest.mark.parametrize("pattern", ["[ab]", "a?c", "a.c", "(x)", "\\d"])
def test_only_the_star_is_special(pattern: str) -> None:
    assert matches(pattern, pattern)
    assert not matches(pattern, "abc")


def test_hostile_patterns_match_in_linear_time() -> None:
    assert not matches("*a" * 100 + "b", "a" * 200)


@given(st.text(min_size=1, max_size=40).filter(lambda text: text.encode(errors="ignore").decode() == text))
def test_key_ids_round_trip(key_id: str) -> None:
    assert decode_api_key_key(api_key_key(key_id)) == key_id


def test_keys_are_checked_by_their_text_and_stored_as_hashes() -> None:
    store = MemoryStore()
    keys = ApiKeys(store)
    key, text = keys.create("worker")
    assert keys.authenticate(text) is key
    secret = text.rpartition("_")[2].encode()
    rows = list(store.scan(Family.API_KEYS))
    assert len(rows) == 1
    assert not [raw for row in rows for raw in row if secret in raw or text.encode() in raw]
    assert ApiKeys(store).authenticate(text).name == "worker"


def test_every_invalid_key_gets_the_same_error() -> None:
    keys = ApiKeys(MemoryStore())
    _, text = keys.create("worker")
    said = set()
    for at in range(len(text)):
        other = text[:at] + ("x" if text[at] != "x" else "y") + text[at + 1 :]
        with pytest.raises(AuthenticationError) as refused:
            keys.authenticate(other)
        said.add(str(refused.value))
    assert len(said) == 1


def test_a_revoked_key_is_deleted() -> None:
    store = MemoryStore()
    keys = ApiKeys(store)
    reported: list[int] = []
    keys.watch(lambda: reported.append(1))
    key, text = keys.create("worker")
    keys.revoke(key.id)
    assert reported
    for each in (keys, ApiKeys(store)):
        with pytest.raises(AuthenticationError):
            each.authenticate(text)
    with pytest.raises(NotFoundError):
        keys.revoke(key.id)


def test_a_key_expires() -> None:
    clock = Clock()
    keys = ApiKeys(MemoryStore(), clock_ns=clock)
    key, text = keys.create("short", expires_ms=clock.now_ms + 10)
    keys.authenticate(text)
    clock.now_ms += 10
    with pytest.raises(AuthenticationError, match="expired"):
        keys.authenticate(text)
    with pytest.raises(AuthenticationError, match="expired"):
        keys.require_current(key)


def test_setting_permissions_is_atomic_and_replaces_existing_ones() -> None:
    keys = ApiKeys(MemoryStore())
    key, _ = keys.create("worker")
    assert not key.may("produce", "a")
    key = keys.permit(key.id, [("produce", "a*"), ("consume", "b")])
    assert key.may("produce", "abc")
    assert not key.may("consume", "abc")
    with pytest.raises(InvalidArgumentError, match="unknown permission 'read'"):
        keys.permit(key.id, [("admin", "*"), ("read", "*")])
    assert keys.get(key.id).permissions == key.permissions
    with pytest.raises(LimitExceededError):
        keys.permit(key.id, [("produce", "x")] * (PERMISSIONS_MAX + 1))
    key = keys.permit(key.id, [])
    assert not key.may("produce", "abc")


@pytest.mark.parametrize("row", [b"", b"\x07", b"\x01", b"\x01\xff", b"\x01\x80"])
def test_an_unreadable_row_is_reported_by_name(row: bytes) -> None:
    store = MemoryStore()
    batch = Batch()
    batch.put(Family.API_KEYS, api_key_key("abc"), row)
    store.write(batch)
    with pytest.raises(CorruptionError, match="API key abc"):
        ApiKeys(store)


@pytest.mark.parametrize(
    ("peer", "is_local"),
    [
        ("ipv4:127.0.0.1:80", True),
        ("ipv4:127.9.9.9:80", True),
        ("ipv6:%5B::1%5D:80", True),
        ("ipv6:[::1]:80", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:80", True),
        ("unix:/run/socket", True),
        ("ipv4:10.0.0.1:80", False),
        ("ipv6:%5B::ffff:10.0.0.1%5D:80", False),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", False),
        ("", False),
        ("nonsense", False),
        ("ipv4:127.0.0.1.example.com:80", False),
    ],
)
def test_loopback_peers_are_recognized(peer: str, is_local: bool) -> None:
    assert peer_of(peer).is_loopback is is_local


def accounts(*, anonymous: str = "guest") -> Accounts:
    """Return users of a new broker: guest, an administrator, and ann, with permissions for queues with the prefix
    `ann`."""
    catalog = Catalog(MemoryStore())
    catalog.open()
    users = Users(catalog, at_once, anonymous_name=lambda: anonymous)
    permissions = Permissions(catalog, at_once)
    users.changed = lambda name: permissions.forget()

    async def populate() -> None:
        await users.create("guest", "guest", tags=["administrator"])
        await permissions.set("guest", "/", configure=".*", write=".*", read=".*")
        await users.create("ann", "secret")
        await permissions.set("ann", "/", configure="^ann", write="^ann", read="^ann\\.")

    asyncio.run(populate())
    return Accounts(users, permissions, "/")


async def at_once() -> None:
    """Return at once, because the store is in memory."""


def known(found: Caller | None) -> Caller:
    assert found is not None, "no login is needed"
    return found


@pytest.mark.promise("P14")
@pytest.mark.parametrize(
    ("mode", "peer", "anonymous", "is_let_in"),
    [
        ("keys", LOCAL, "guest", False),
        ("keys", REMOTE, "guest", False),
        ("loopback", LOCAL, "guest", True),
        ("loopback", REMOTE, "guest", False),
        ("loopback", LOCAL, "", False),
        ("loopback", LOCAL, "nobody", False),
    ],
)
def test_clients_without_credentials_never_administer(
    mode: AccessMode, peer: str, anonymous: str, is_let_in: bool
) -> None:
    access = Access(ApiKeys(MemoryStore()), accounts(anonymous=anonymous), mode)
    if not is_let_in:
        with pytest.raises(AuthenticationError):
            access.caller((), peer)
        return
    caller = known(access.caller((), peer))
    for kind in KINDS:
        caller.require(kind, "any")
    refused = "user 'guest' without credentials may not"
    with pytest.raises(AccessRefusedError, match=refused):
        caller.require_superadmin("make API keys")
    with pytest.raises(AccessRefusedError, match=refused):
        caller.require_everywhere("admin", "change settings")


@pytest.mark.promise("P14")
def test_anonymous_callers_have_the_permissions_of_the_anonymous_user_while_it_exists() -> None:
    book = accounts(anonymous="ann")
    access = Access(ApiKeys(MemoryStore()), book, "loopback")
    caller = known(access.caller((), LOCAL))
    caller.require("produce", "ann-1")
    assert (caller.sees("ann-1"), caller.sees("bob")) == (True, False)
    with pytest.raises(AccessRefusedError):
        caller.require("consume", "ann-1")
    asyncio.run(book.permissions.set("ann", "/", configure="", write="", read=""))
    with pytest.raises(AccessRefusedError):
        caller.require("produce", "ann-1")
    asyncio.run(book.users.delete("ann"))
    assert not caller.is_current()
    with pytest.raises(AuthenticationError):
        access.caller((), LOCAL)


def test_basic_credentials_have_the_permissions_of_the_user() -> None:
    book = accounts()
    access = Access(ApiKeys(MemoryStore()), book, "keys")

    def log_in(text: str) -> Caller:
        fields = [("authorization", "Basic " + base64.b64encode(text.encode()).decode())]
        assert access.caller(fields, LOCAL) is None
        return asyncio.run(access.log_in(fields, LOCAL))

    ann, guest = log_in("ann:secret"), log_in("guest:guest")
    ann.require("admin", "ann-1")
    with pytest.raises(AccessRefusedError):
        ann.require("admin", "bob")
    with pytest.raises(AccessRefusedError, match="user 'ann' may not make API keys"):
        ann.require_superadmin("make API keys")
    guest.require_superadmin("make API keys")
    asyncio.run(book.users.set_tags("guest", []))
    with pytest.raises(AccessRefusedError):
        guest.require_superadmin("make API keys")
    assert not guest.is_current()
    for wrong in ("ann:", "ann:wrong", "nobody:x", "ann"):
        with pytest.raises(AuthenticationError):
            log_in(wrong)


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER  {} "])
def test_a_sent_key_is_checked_even_if_none_is_required(form: str) -> None:
    keys = ApiKeys(MemoryStore())
    key, text = keys.create("little")
    keys.permit(key.id, [("produce", "a")])
    access = Access(keys, accounts(), "loopback")
    caller = known(access.caller([("authorization", form.format(text))], LOCAL))
    caller.require("produce", "a")
    with pytest.raises(AccessRefusedError, match="may not consume from queue 'a'"):
        caller.require("consume", "a")
    assert caller.sees("a")
    assert not caller.sees("b")
    keys.permit(key.id, [])
    with pytest.raises(AccessRefusedError):
        caller.require("produce", "a")
    keys.revoke(key.id)
    with pytest.raises(AuthenticationError, match="revoked"):
        caller.require("produce", "a")


@pytest.mark.parametrize("text", ["", "Digest Zm9v", "Bearer", "Bearer x", "fila_x"])
def test_unsupported_authorization_schemes_are_refused(text: str) -> None:
    access, fields = Access(ApiKeys(MemoryStore()), accounts(), "loopback"), [("authorization", text)]

    def ask() -> None:
        assert access.caller(fields, LOCAL) is None
        asyncio.run(access.log_in(fields, LOCAL))

    with pytest.raises(AuthenticationError):
        ask()


def test_invalid_keys_are_throttled_and_valid_keys_are_not() -> None:
    book, keys = accounts(), ApiKeys(MemoryStore())
    waits: list[float] = []

    async def sleep(wait_s: float) -> None:
        waits.append(wait_s)

    book.users.throttle = LoginThrottle(sleep=sleep)
    access = Access(keys, book, "keys")
    _, text = keys.create("worker")
    for _ in range(6):
        with pytest.raises(AuthenticationError):
            asyncio.run(access.log_in([("authorization", f"Bearer {text}x")], REMOTE))
    assert waits == sorted(waits)
    assert waits[-1] > 1
    assert known(access.caller([("authorization", f"Bearer {text}")], REMOTE)).is_current()
