"""Who asks: HTTP basic authentication with the broker's users.

Checking a password is slow on purpose; the broker's users do it in threads, a few at a time, and remember what was
right. Here only the number of clients that wait for it is bounded, so that somebody who guesses does not fill memory.
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
"""Clients waiting for their password to be checked; more are told to come back."""

_log: Final = logging.getLogger(__name__)

CHALLENGE: Final = {"WWW-Authenticate": 'Basic realm="Basalt", charset="UTF-8"'}


class UserBook(Protocol):
    """What this needs of the broker's users."""

    def authenticate(self, name: str, password: str, peer: Peer) -> Awaitable[User]:
        """The user; raises if there is none of that name and password."""
        ...


class Authenticator:
    """Turns a request into the user who made it."""

    def __init__(self, users: UserBook) -> None:
        self._users = users
        self._waiting = 0

    async def user(self, request: Request) -> User:
        name, password = credentials(request)
        if self._waiting >= WAITING_MAX:
            raise HttpError(429, "too many clients ask for their password to be checked", headers={"Retry-After": "1"})
        self._waiting += 1
        try:
            return await self._users.authenticate(name, password, Peer(request.peer, request.is_loopback))
        except TooManyLoginsError as error:
            later = {"Retry-After": str(max(1, round(error.retry_after_s)))}
            raise HttpError(429, str(error), code=error.code, headers=later) from error
        except BasaltError as error:
            _log.warning("%s was refused for user %r: %s", request.peer, name, error.code)
            raise HttpError(401, str(error), code=error.code, headers=CHALLENGE) from error
        finally:
            self._waiting -= 1


def credentials(request: Request) -> tuple[str, str]:
    """(name, password) of the Authorization header."""
    scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
    if not scheme:
        raise HttpError(401, "give a user and a password of the broker (HTTP basic)", headers=CHALLENGE)
    if scheme.lower() != "basic":
        raise HttpError(401, f"{scheme[:20]} is not spoken here; use HTTP basic", headers=CHALLENGE)
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise HttpError(401, "the Authorization header cannot be read", headers=CHALLENGE) from None
    if not colon:
        raise HttpError(401, "the Authorization header has no password", headers=CHALLENGE)
    return name, password
