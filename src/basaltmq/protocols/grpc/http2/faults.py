"""Protocol violations by the peer: connection errors and stream errors (RFC 9113, section 5.4)."""

from __future__ import annotations

from basaltmq.protocols.grpc.http2.frames import Code


class ConnectionFault(Exception):
    """A connection error: the connection must end."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFault(Exception):
    """A stream error: one stream is reset, the others continue."""

    def __init__(self, stream_id: int, code: Code, text: str) -> None:
        super().__init__(text)
        self.stream_id = stream_id
        self.code = code
