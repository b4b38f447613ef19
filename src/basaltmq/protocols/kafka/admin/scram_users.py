"""DescribeUserScramCredentials and AlterUserScramCredentials, for administrators.

The client sends a salted password, so the broker never sees the password itself. The user must exist. A credential
adds a way to authenticate and keeps the user's permissions.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from basaltmq.broker.auth.scram import SHA_256, SHA_512, of_salted
from basaltmq.errors import BasaltError, InvalidArgumentError, UserNotFoundError
from basaltmq.protocols.kafka.context import Client, Context, Response
from basaltmq.protocols.kafka.wire import errors as e
from basaltmq.protocols.kafka.wire.api import Request
from basaltmq.protocols.kafka.wire.schema import Fields

MECHANISMS: Final = {1: SHA_256, 2: SHA_512}
_NOT_ALLOWED: Final = "only administrators may describe and alter SCRAM credentials"


def describe(context: Context, client: Client, request: Request) -> Response:
    if not client.is_administrator():
        return {"error_code": e.CLUSTER_AUTHORIZATION_FAILED, "error_message": _NOT_ALLOWED}
    users = context.node.users
    requested = request.body["users"]
    if requested:
        counted = Counter(each["name"] for each in requested)
        return {"results": [_described(context, name, count > 1) for name, count in counted.items()]}
    return {
        "results": [found for user in users.list() if (found := _described(context, user.name))["credential_infos"]]
    }


def _described(context: Context, name: str, is_repeated: bool = False) -> Fields:
    if is_repeated:
        message = f"the request names user {name!r} more than once"
        return {"user": name, "error_code": e.DUPLICATE_RESOURCE, "error_message": message}
    found = [
        {"mechanism": number, "iterations": credential.iterations}
        for number, mechanism in MECHANISMS.items()
        if (credential := context.node.users.scram_of(name, mechanism)) is not None
    ]
    if not found:
        message = f"user {name!r} has no SCRAM credential"
        return {"user": name, "error_code": e.RESOURCE_NOT_FOUND, "error_message": message, "credential_infos": []}
    return {"user": name, "credential_infos": found}


async def alter(context: Context, client: Client, request: Request) -> Fields:
    changes = [(each, True) for each in request.body["deletions"]]
    changes += [(each, False) for each in request.body["upsertions"]]
    counted = Counter((each["name"], each["mechanism"]) for each, _ in changes)
    results: dict[str, Fields] = {}
    for each, is_deletion in changes:
        name = each["name"]
        if not client.is_administrator():
            result = _refused(name, e.CLUSTER_AUTHORIZATION_FAILED, _NOT_ALLOWED)
        elif counted[name, each["mechanism"]] > 1:
            message = f"the request names a credential of user {name!r} more than once"
            result = _refused(name, e.DUPLICATE_RESOURCE, message)
        else:
            result = await _altered(context, each, is_deletion)
        if not results.get(name, {}).get("error_code"):
            results[name] = result
    return {"results": list(results.values())}


async def _altered(context: Context, item: Fields, is_deletion: bool) -> Fields:
    name = item["name"]
    mechanism = MECHANISMS.get(item["mechanism"])
    if mechanism is None:
        return _refused(name, e.UNSUPPORTED_SASL_MECHANISM, f"unknown SCRAM mechanism {item['mechanism']}")
    users = context.node.users
    try:
        if is_deletion and users.scram_of(name, mechanism) is None:
            return _refused(name, e.RESOURCE_NOT_FOUND, f"user {name!r} has no {mechanism} credential")
        made = None
        if not is_deletion:
            made = of_salted(mechanism, item["salt"], item["iterations"], item["salted_password"])
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
