"""Who asks: HTTP basic authentication with the broker's users.

Checking a password is slow on purpose (tens of milliseconds of a core), and HTTP sends it with every request. So a
password that was right is remembered for a short time, under a keyed hash that means nothing outside this process, and
forgotten as soon as the user's record is another one. Wrong ones are never remembered; checks run in a thread, few at a
time, so that somebody who guesses takes nothing from the loop.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from basaltmq.admin.message import HttpError, Request
from basaltmq.admin.routes import Principal
from basaltmq.errors import BasaltError

REMEMBERED_S: Final = 60.0
"""How long a right password is not checked again; a removed user is refused at once all the same."""

REMEMBERED_MAX: Final = 1_024
"""Users that use the API at the same time, with room to spare."""

CHECKS_AT_ONCE: Final = 2
WAITING_MAX: Final = 64
"""Clients waiting for their password to be checked; more are told to come back."""

CHALLENGE: Final = {"WWW-Authenticate": 'Basic realm="Basalt", charset="UTF-8"'}


class UserBook(Protocol):
    """What this needs of the broker's users."""

    def authenticate(self, name: str, password: str, *, peer_is_loopback: bool) -> Any:
        """The user; raises if there is none of that name and password. Slow; called in a thread."""
        ...

    def record(self, name: str) -> object | None:
        """What compares equal as long as nothing about the user changed; None if there is no such user."""
        ...


class Authenticator:
    """Turns a request into the user who made it."""

    def __init__(self, users: UserBook, *, secret: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._users = users
        self._secret = secret
        self._clock = clock
        self._known: dict[bytes, tuple[float, object, Principal]] = {}
        self._checks = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._waiting = 0

    async def user(self, request: Request) -> Principal:
        name, password = credentials(request)
        digest = hashlib.blake2b(
            f"{len(name)}:{name}{password}|{request.is_loopback}".encode(), key=self._secret, digest_size=32
        ).digest()
        record = self._users.record(name)
        known = self._known.get(digest)
        if known is not None and record is not None and known[0] > self._clock() and known[1] == record:
            return known[2]
        user = await self._check(name, password, request.is_loopback)
        if len(self._known) >= REMEMBERED_MAX:
            self._known.clear()
        if record is not None:
            self._known[digest] = (self._clock() + REMEMBERED_S, record, user)
        return user

    async def _check(self, name: str, password: str, is_loopback: bool) -> Principal:
        if self._waiting >= WAITING_MAX:
            raise HttpError(429, "too many clients ask for their password to be checked", headers={"Retry-After": "1"})
        self._waiting += 1
        try:
            async with self._checks:
                checked: Principal = await asyncio.to_thread(
                    self._users.authenticate, name, password, peer_is_loopback=is_loopback
                )
                return checked
        except BasaltError as error:
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
