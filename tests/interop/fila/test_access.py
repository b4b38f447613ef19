"""API keys and their permissions, with Fila's client and its admin stubs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fila
import grpc
import pytest
from fila.v1 import admin_pb2
from tests.interop.fila.conftest import Admin, Server

CALLS = {
    "CreateQueue": {"name": "orders.new"},
    "DeleteQueue": {"queue": "orders.old"},
    "SetConfig": {"key": "k", "value": "v"},
    "GetConfig": {"key": "k"},
    "ListConfig": {"prefix": ""},
    "GetStats": {"queue": "orders.eu"},
    "Redrive": {"dlq_queue": "orders.eu.dlq"},
    "ListQueues": {},
    "CreateApiKey": {"name": "x"},
    "RevokeApiKey": {"key_id": "none"},
    "ListApiKeys": {},
    "SetAcl": {"key_id": "none"},
    "GetAcl": {"key_id": "none"},
}


class Kept:
    """A server, and a superadmin key."""

    def __init__(self, server: Server, channel: grpc.Channel) -> None:
        self.server = server
        self.channel = channel
        self.root = Admin(channel)

    def key(self, *permissions: tuple[str, str], **fields: Any) -> Any:
        made = self.root.CreateApiKey(name="tested", **fields)
        if permissions:
            self.permit(made.key_id, *permissions)
        return made

    def permit(self, key_id: str, *permissions: tuple[str, str]) -> None:
        wanted = [admin_pb2.AclPermission(kind=kind, pattern=pattern) for kind, pattern in permissions]
        self.root.SetAcl(key_id=key_id, permissions=wanted)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    server = Server(tmp_path_factory.mktemp("access") / "store", {"access": "loopback"})
    with grpc.insecure_channel(server.address) as channel:
        found = Kept(server, channel)
        for name in ("orders.eu", "orders.us", "billing"):
            found.root.CreateQueue(name=name)
        yield found
    server.stop()


def verdict(call: Callable[[], object]) -> str:
    """Return ok, or the status of the refusal."""
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    except fila.RPCError as error:
        return str(error.code.name)
    except fila.FilaError as error:
        return type(error).__name__
    return "ok"


@pytest.mark.parametrize(
    ("permissions", "enqueue_eu", "enqueue_billing", "ack_eu", "stats_eu"),
    [
        ([], "PERMISSION_DENIED", "PERMISSION_DENIED", "PERMISSION_DENIED", "PERMISSION_DENIED"),
        ([("produce", "orders.eu")], "ok", "PERMISSION_DENIED", "PERMISSION_DENIED", "PERMISSION_DENIED"),
        ([("produce", "orders.*")], "ok", "PERMISSION_DENIED", "PERMISSION_DENIED", "PERMISSION_DENIED"),
        ([("produce", "*")], "ok", "ok", "PERMISSION_DENIED", "PERMISSION_DENIED"),
        ([("produce", "*.us")], "PERMISSION_DENIED", "PERMISSION_DENIED", "PERMISSION_DENIED", "PERMISSION_DENIED"),
        ([("consume", "o*eu")], "PERMISSION_DENIED", "PERMISSION_DENIED", "MessageNotFoundError", "PERMISSION_DENIED"),
        ([("admin", "orders.eu")], "PERMISSION_DENIED", "PERMISSION_DENIED", "PERMISSION_DENIED", "ok"),
        (
            [("produce", "billing"), ("consume", "orders.eu"), ("admin", "*")],
            "PERMISSION_DENIED",
            "ok",
            "MessageNotFoundError",
            "ok",
        ),
    ],
)
def test_a_key_has_the_permissions_of_its_patterns(
    kept: Kept,
    permissions: list[tuple[str, str]],
    enqueue_eu: str,
    enqueue_billing: str,
    ack_eu: str,
    stats_eu: str,
) -> None:
    key = kept.key(*permissions)
    unknown = "0198c0de-0000-7000-8000-000000000000"
    with fila.Client(kept.server.address, api_key=key.key) as client:
        assert verdict(lambda: client.enqueue("orders.eu", None, b"")) == enqueue_eu
        assert verdict(lambda: client.enqueue("billing", None, b"")) == enqueue_billing
        assert verdict(lambda: client.ack("orders.eu", unknown)) == ack_eu
        assert verdict(lambda: client.nack("orders.eu", unknown, "")) == ack_eu
    admin = Admin(kept.channel, key.key)
    assert verdict(lambda: admin.GetStats(queue="orders.eu")) == stats_eu


@pytest.mark.parametrize("call", CALLS)
def test_administrative_calls_require_a_key_with_permissions(kept: Kept, call: str) -> None:
    admin = Admin(kept.channel, kept.key().key)
    response = verdict(lambda: getattr(admin, call)(**CALLS[call]))
    assert response == ("ok" if call == "ListQueues" else "PERMISSION_DENIED")
    if call == "ListQueues":
        assert not admin.ListQueues().queues, "what one may not touch one does not see"


@pytest.mark.parametrize("call", CALLS)
def test_creating_keys_requires_a_superadmin(kept: Kept, call: str) -> None:
    admin = Admin(kept.channel, kept.key(("admin", "*")).key)
    response = verdict(lambda: getattr(admin, call)(**CALLS[call]))
    needs_superadmin = "Key" in call or "Acl" in call
    assert (response == "PERMISSION_DENIED") is needs_superadmin


def test_redrive_requires_permissions_on_both_queues(kept: Kept) -> None:
    one = Admin(kept.channel, kept.key(("admin", "orders.eu.dlq")).key)
    assert verdict(lambda: one.Redrive(dlq_queue="orders.eu.dlq")) == "PERMISSION_DENIED"
    both = Admin(kept.channel, kept.key(("admin", "orders.eu*")).key)
    assert verdict(lambda: both.Redrive(dlq_queue="orders.eu.dlq")) == "ok"


@pytest.mark.parametrize("text", ["", "fila_", "fila_0123456789abcdef_" + "A" * 43, "x" * 5000, "Bearer"])
def test_an_invalid_key_is_refused_even_if_none_is_required(kept: Kept, text: str) -> None:
    admin = Admin(kept.channel, text)
    assert verdict(admin.ListQueues) == "UNAUTHENTICATED"


def test_clients_without_a_key_are_accepted_only_from_loopback_if_configured(serve: Callable[..., Server]) -> None:
    with grpc.insecure_channel(serve(access="keys").address) as channel:
        assert verdict(Admin(channel, is_anonymous=True).ListQueues) == "UNAUTHENTICATED"
        assert verdict(Admin(channel).ListQueues) == "ok", "guest logs in"
    with grpc.insecure_channel(serve(access="loopback").address) as channel:
        assert verdict(Admin(channel, is_anonymous=True).ListQueues) == "ok"


@pytest.mark.promise("P14")
@pytest.mark.parametrize("call", CALLS)
def test_clients_without_credentials_may_use_queues_but_not_administer(kept: Kept, call: str) -> None:
    response = verdict(lambda: getattr(Admin(kept.channel, is_anonymous=True), call)(**CALLS[call]))
    administers = any(word in call for word in ("Key", "Acl", "Config"))
    assert (response == "PERMISSION_DENIED") is administers


def test_a_superadmin_may_do_everything(kept: Kept) -> None:
    made = kept.key(is_superadmin=True)
    assert made.is_superadmin
    admin = Admin(kept.channel, made.key)
    assert admin.CreateApiKey(name="second").key_id
    assert admin.GetAcl(key_id=made.key_id).is_superadmin
    with fila.Client(kept.server.address, api_key=made.key) as client:
        client.enqueue("billing", None, b"")


def test_keys_are_listed_without_their_text_and_stored_without_it(kept: Kept) -> None:
    made = kept.key(("produce", "a*"), ("consume", "b"))
    listed = {each.key_id: each for each in kept.root.ListApiKeys().keys}
    assert listed[made.key_id].name == "tested"
    assert listed[made.key_id].created_at_ms > 0
    secret = made.key.rpartition("_")[2]
    assert secret not in str(kept.root.ListApiKeys())
    acl = kept.root.GetAcl(key_id=made.key_id)
    assert [(each.kind, each.pattern) for each in acl.permissions] == [("produce", "a*"), ("consume", "b")]
    files = [path for path in Path(kept.server.directory).rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if secret.encode() in path.read_bytes()]


@pytest.mark.parametrize("permission", [("write", "*"), ("produce", ""), ("produce", "x" * 300)])
def test_an_invalid_permission_is_refused(kept: Kept, permission: tuple[str, str]) -> None:
    key = kept.key(("consume", "billing"))
    assert verdict(lambda: kept.permit(key.key_id, permission)) == "INVALID_ARGUMENT"
    assert len(kept.root.GetAcl(key_id=key.key_id).permissions) == 1, "the permissions before are untouched"


def test_a_key_stops_working_when_it_expires(kept: Kept) -> None:
    key = kept.key(("produce", "*"), expires_at_ms=int(time.time() * 1000) + 700)
    with fila.Client(kept.server.address, api_key=key.key) as client:
        assert verdict(lambda: client.enqueue("billing", None, b"")) == "ok"
        until_s = time.monotonic() + 20
        while verdict(lambda: client.enqueue("billing", None, b"")) == "ok":
            assert time.monotonic() < until_s
        assert verdict(lambda: client.enqueue("billing", None, b"")) == "UNAUTHENTICATED"


@pytest.mark.parametrize("how", ["revoke", "permit"])
def test_a_stream_ends_when_its_key_loses_the_permission_to_consume(kept: Kept, how: str) -> None:
    key = kept.key(("consume", "orders.us"), ("produce", "orders.us"))
    with fila.Client(kept.server.address, api_key=key.key) as client:
        client.enqueue("orders.us", None, b"")
        stream = client.consume("orders.us")
        client.ack("orders.us", next(stream).id)
        if how == "revoke":
            kept.root.RevokeApiKey(key_id=key.key_id)
        else:
            kept.permit(key.key_id, ("produce", "orders.us"))
        assert list(stream) == []
        response = verdict(lambda: client.ack("orders.us", "0198c0de-0000-7000-8000-000000000000"))
        assert response == ("UNAUTHENTICATED" if how == "revoke" else "PERMISSION_DENIED")


def test_keys_survive_a_crash(serve: Callable[..., Server]) -> None:
    server = serve(access="loopback")
    with grpc.insecure_channel(server.address) as channel:
        Admin(channel).CreateQueue(name="q")
        made = Admin(channel).CreateApiKey(name="lasting")
        Admin(channel).SetAcl(key_id=made.key_id, permissions=[admin_pb2.AclPermission(kind="produce", pattern="q")])
    server.kill()
    server.start()
    with fila.Client(server.address, api_key=made.key) as client:
        client.enqueue("q", None, b"")
