"""Requests for the SCRAM credentials of users: who has one, giving and taking them. For administrators.

A client sends the password salted, so the broker never sees it. The user has to exist; a credential is one more way in
for them, with the permissions they have.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from basaltmq.broker.auth.scram import SHA_256, SHA_512, of_salted
from basaltmq.errors import BasaltError, InvalidArgumentError, UserNotFoundError
from basaltmq.protocols.kafka.context import Answer, Client, Desk
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.schema import Fields

MECHANISMS: Final = {1: SHA_256, 2: SHA_512}
_NOT_ALLOWED: Final = "only administrators see and change credentials"


def describe(desk: Desk, client: Client, request: Request) -> Answer:
    if not client.is_administrator():
        return {"error_code": e.CLUSTER_AUTHORIZATION_FAILED, "error_message": _NOT_ALLOWED}
    users = desk.node.users
    asked = request.body["users"]
    if asked:
        counted = Counter(each["name"] for each in asked)
        return {"results": [_described(desk, name, count > 1) for name, count in counted.items()]}
    return {"results": [found for user in users.list() if (found := _described(desk, user.name))["credential_infos"]]}


def _described(desk: Desk, name: str, is_twice: bool = False) -> Fields:
    if is_twice:
        message = f"user {name!r} is named twice in one request"
        return {"user": name, "error_code": e.DUPLICATE_RESOURCE, "error_message": message}
    found = [
        {"mechanism": number, "iterations": credential.iterations}
        for number, mechanism in MECHANISMS.items()
        if (credential := desk.node.users.scram_of(name, mechanism)) is not None
    ]
    if not found:
        message = f"user {name!r} has no SCRAM credential"
        return {"user": name, "error_code": e.RESOURCE_NOT_FOUND, "error_message": message, "credential_infos": []}
    return {"user": name, "credential_infos": found}


async def alter(desk: Desk, client: Client, request: Request) -> Fields:
    changes = [(each, True) for each in request.body["deletions"]]
    changes += [(each, False) for each in request.body["upsertions"]]
    counted = Counter((each["name"], each["mechanism"]) for each, _ in changes)
    results: dict[str, Fields] = {}
    for each, is_deletion in changes:
        name = each["name"]
        if not client.is_administrator():
            told = _refused(name, e.CLUSTER_AUTHORIZATION_FAILED, _NOT_ALLOWED)
        elif counted[name, each["mechanism"]] > 1:
            told = _refused(name, e.DUPLICATE_RESOURCE, f"a credential of {name!r} is named twice in one request")
        else:
            told = await _altered(desk, each, is_deletion)
        if not results.get(name, {}).get("error_code"):
            results[name] = told
    return {"results": list(results.values())}


async def _altered(desk: Desk, asked: Fields, is_deletion: bool) -> Fields:
    name = asked["name"]
    mechanism = MECHANISMS.get(asked["mechanism"])
    if mechanism is None:
        return _refused(name, e.UNSUPPORTED_SASL_MECHANISM, f"there is no mechanism {asked['mechanism']}")
    users = desk.node.users
    try:
        if is_deletion and users.scram_of(name, mechanism) is None:
            return _refused(name, e.RESOURCE_NOT_FOUND, f"user {name!r} has no credential of {mechanism}")
        made = None
        if not is_deletion:
            made = of_salted(mechanism, asked["salt"], asked["iterations"], asked["salted_password"])
        await users.set_scram(name, mechanism, made)
    except UserNotFoundError as error:
        return _refused(name, e.RESOURCE_NOT_FOUND, str(error))
    except InvalidArgumentError as error:
        return _refused(name, e.UNACCEPTABLE_CREDENTIAL, str(error))
    except BasaltError as error:
        return _refused(name, e.code_of(error), str(error))
    return {"user": name}


def _refused(name: str, code: int, message: str) -> Fields:
    return {"user": name, "error_code": code, "error_message": message}
