"""SCRAM: the example of its RFC, and refused messages."""

from __future__ import annotations

import base64
import hashlib

import pytest

from basaltmq.broker.auth.scram import SHA_256, ScramCredential, of_row, of_salted
from basaltmq.broker.auth.scram_exchange import ScramExchange
from basaltmq.errors import AuthenticationError, InvalidArgumentError

SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
SALTED = hashlib.pbkdf2_hmac("sha256", b"pencil", SALT, 4096)
THEIRS = "rOprNGfwEbeRWgbNEkqO"
OURS = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
FIRST = f"n,,n=user,r={THEIRS}".encode()
FINAL = f"c=biws,r={THEIRS}{OURS},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=".encode()


def exchange(*, is_somebody: bool = True) -> ScramExchange:
    made = of_salted(SHA_256, SALT, 4096, SALTED)
    assert of_row(made.row()) == made
    return ScramExchange(SHA_256, lambda name: (made, is_somebody), OURS)


def test_the_example_of_the_rfc_is_accepted() -> None:
    begun = exchange()
    assert begun.first(FIRST) == f"r={THEIRS}{OURS},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode()
    assert begun.final(FINAL) == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    assert begun.name == "user"


@pytest.mark.parametrize(
    "final",
    [
        FINAL.replace(b"dHz", b"dHy"),
        FINAL.replace(b"c=biws", b"c=eSws"),
        FINAL.replace(b"rOpr", b"rOps"),
        FINAL[:-9],
        b"",
        b"\xff,p=AA==",
    ],
)
def test_invalid_proofs_are_refused(final: bytes) -> None:
    begun = exchange()
    begun.first(FIRST)
    with pytest.raises(AuthenticationError):
        begun.final(final)


def test_a_valid_proof_for_an_unknown_user_is_refused() -> None:
    begun = exchange(is_somebody=False)
    begun.first(FIRST)
    with pytest.raises(AuthenticationError, match="wrong"):
        begun.final(FINAL)


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"n,,",
        b"p=tls-unique,,n=user,r=abc",
        b"n,,n=user",
        b"n,,r=abc",
        b"n,a=other,n=user,r=abc",
        b"n,,m=ext,n=user,r=abc",
        b"n,,n=user,r=abc,tokenauth=true",
        b"n,,n=user,r=" + b"x" * 2000,
        b"\xff\xfe",
    ],
)
def test_invalid_first_messages_are_refused(first: bytes) -> None:
    with pytest.raises(AuthenticationError):
        exchange().first(first)


def test_names_with_commas_and_equal_signs_are_decoded() -> None:
    asked: list[str] = []

    def credential_of(name: str) -> tuple[ScramCredential, bool]:
        asked.append(name)
        return ScramCredential(b"s", 4096, b"", b""), False

    ScramExchange(SHA_256, credential_of, OURS).first(b"y,a=a=3Db=2Cc,n=a=3Db=2Cc,r=abc")
    assert asked == ["a=b,c"]


@pytest.mark.parametrize(
    ("salt", "iterations", "salted"),
    [(SALT, 4095, SALTED), (SALT, 16_385, SALTED), (b"", 4096, SALTED), (SALT, 4096, SALTED[:-1])],
)
def test_weak_or_invalid_credentials_are_refused(salt: bytes, iterations: int, salted: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        of_salted(SHA_256, salt, iterations, salted)
