"""The HTTP client of the admin API, against a small server in this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from basaltmq.errors import InvalidArgumentError, RemoteError, TopicNotFoundError, UnavailableError
from basaltmq.http_client import (
    FIRST_RETRY_S,
    HttpClient,
    Login,
    RetryingClient,
    check_server,
    parse_server,
    path,
)

Response = tuple[int, str, bytes]
OK: Response = (200, "application/json", b'{"ok":true}')
BUSY: Response = (503, "application/json", b'{"reason":"starting","code":"unavailable"}')
MISSING: Response = (404, "application/json", b'{"reason":"topic \'t\' does not exist","code":"topic_not_found"}')


@contextmanager
def serving(*responses: Response | None) -> Iterator[tuple[str, list[str]]]:
    """Serve these responses in turn, None as a connection that breaks. Yield the address and the requests."""
    left = list(responses)
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(f"{self.command} {self.path}")
            response = left.pop(0)
            if response is None:
                self.connection.close()
                return
            status, kind, body = response
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

        def finish(self) -> None:
            if not self.wfile.closed and self.connection.fileno() >= 0:
                super().finish()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_requests_encode_names_and_omit_parameters_without_a_value() -> None:
    with serving(OK) as (server, seen):
        assert HttpClient(Login(server)).get(path("queues", "/", "a b"), page=1, filter=None) == {"ok": True}
    assert seen == ["GET /api/queues/%2F/a%20b?page=1"]


def test_error_responses_raise_with_code_and_status() -> None:
    with serving(MISSING, BUSY, (500, "text/plain", b"oops")) as (server, _):
        client = HttpClient(Login(server))
        for code, status, text in (("topic_not_found", 404, "'t'"), ("unavailable", 503, "starting")):
            with pytest.raises(RemoteError, match=text) as caught:
                client.get("/api/x")
            assert (caught.value.code, caught.value.status) == (code, status)
        with pytest.raises(RemoteError, match="responded with status 500: oops"):
            client.get("/api/x")


def test_a_retrying_client_repeats_failed_requests_and_raises_typed_errors() -> None:
    clock = Clock()
    with serving(None, BUSY, OK, MISSING) as (server, seen):
        client = RetryingClient(Login(server), clock_s=clock.time, sleep=clock.sleep)
        assert client.get("/api/x") == {"ok": True}
        assert len(seen) == 3
        with pytest.raises(TopicNotFoundError):
            client.get("/api/x")


@pytest.mark.parametrize(("is_known", "waits_s"), [(False, FIRST_RETRY_S), (True, 30.0)])
def test_retries_end_at_their_timeout_and_earlier_for_an_unknown_host(is_known: bool, waits_s: float) -> None:
    clock = Clock()
    login = Login("http://127.0.0.1:1", "ann", "hidden", retry_s=30.0)
    client = RetryingClient(login, is_known=is_known, clock_s=clock.time, sleep=clock.sleep)
    with pytest.raises(UnavailableError, match=r"no broker responds at http://127\.0\.0\.1:1 ") as caught:
        client.get("/api/x")
    assert clock.now_s == pytest.approx(waits_s)
    assert "hidden" not in f"{caught.value} {login!r} {login}"


def test_an_address_that_does_not_speak_http_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_respond_with_amqp, args=(listener,))
        thread.start()
        server = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(RemoteError, match=f"{server} responds, but not with HTTP: .* port 15672 by default"):
            HttpClient(Login(server)).get("/api/x")
        thread.join(30)


def _respond_with_amqp(listener: socket.socket) -> None:
    listener.settimeout(30)
    accepted, _ = listener.accept()
    with accepted:
        accepted.settimeout(30)
        accepted.recv(65536)
        accepted.sendall(b"AMQP\x00\x00\x09\x01")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host", "http://host:15672"),
        ("https://host/", "https://host:15672"),
        ("http://[::1]:80/base/", "http://[::1]:80/base"),
    ],
)
def test_addresses_are_normalized(text: str, address: str) -> None:
    assert check_server(text) == address


def test_credentials_in_an_address_are_parsed_and_not_part_of_errors() -> None:
    assert parse_server("http://a%40b:p%3Aw@host:1") == ("http://host:1", "a@b", "p:w")
    with pytest.raises(InvalidArgumentError, match="must not contain credentials"):
        check_server("http://ann:secret@host")
    for bad in ("ftp://ann:secret@host", "http://ann:secret@host:port", "http://"):
        with pytest.raises(InvalidArgumentError, match="is not the address") as caught:
            parse_server(bad)
        assert "secret" not in str(caught.value)
