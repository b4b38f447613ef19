"""HTTP basic authentication with the broker's users.

Password checks are slow on purpose. `Users` runs them in a few threads and caches successful checks. This module only
limits how many clients may wait for a check, so that password guessing cannot exhaust memory.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Awaitable
from typing import Final, Protocol

from basaltmq.admin.http.message import HttpError, Request
from basaltmq.broker.auth.users import User
from basaltmq.broker.peer import Peer
from basaltmq.errors import BasaltError, TooManyLoginsError

WAITING_MAX: Final = 64
"""Clients that may wait for a password check. Further clients get 429."""

_log: Final = logging.getLogger(__name__)

CHALLENGE: Final = {"WWW-Authenticate": 'Basic realm="Basalt", charset="UTF-8"'}


class UserDirectory(Protocol):
    """The part of `Users` that authentication needs."""

    def authenticate(self, name: str, password: str, peer: Peer) -> Awaitable[User]:
        """Return the user. Raise if the name or the password is wrong."""
        ...


class Authenticator:
    """Determines the user of a request."""

    def __init__(self, users: UserDirectory) -> None:
        self._users = users
        self._waiting = 0

    async def user(self, request: Request) -> User:
        name, password = credentials(request)
        if self._waiting >= WAITING_MAX:
            raise HttpError(429, "too many clients wait for a password check", headers={"Retry-After": "1"})
        self._waiting += 1
        try:
            return await self._users.authenticate(name, password, Peer(request.peer, request.is_loopback))
        except TooManyLoginsError as error:
            later = {"Retry-After": str(max(1, round(error.retry_after_s)))}
            raise HttpError(429, str(error), code=error.code, headers=later) from error
        except BasaltError as error:
            _log.warning("login from %s as user %r refused: %s", request.peer, name, error.code)
            raise HttpError(401, str(error), code=error.code, headers=CHALLENGE) from error
        finally:
            self._waiting -= 1


def credentials(request: Request) -> tuple[str, str]:
    """Return the name and the password of the Authorization header."""
    scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
    if not scheme:
        raise HttpError(401, "send a user name and a password of the broker (HTTP basic)", headers=CHALLENGE)
    if scheme.lower() != "basic":
        raise HttpError(401, f"the scheme {scheme[:20]} is not supported; use HTTP basic", headers=CHALLENGE)
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise HttpError(401, "the Authorization header is malformed", headers=CHALLENGE) from None
    if not colon:
        raise HttpError(401, "the Authorization header has no password", headers=CHALLENGE)
    return name, password
