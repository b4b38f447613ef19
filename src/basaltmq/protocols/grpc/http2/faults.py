"""How the other side may break the rules: of the whole connection, or of one stream."""

from __future__ import annotations

from basaltmq.protocols.grpc.http2.frames import Code


class ConnectionFault(Exception):
    """The connection cannot go on."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFault(Exception):
    """One stream cannot go on; the others are not touched."""

    def __init__(self, stream_id: int, code: Code, text: str) -> None:
        super().__init__(text)
        self.stream_id = stream_id
        self.code = code
