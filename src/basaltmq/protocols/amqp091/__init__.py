"""AMQP 0-9-1 as RabbitMQ's clients speak it.

Theory of operation. `Session` is the protocol without I/O: it is fed the bytes of a connection and yields events, one
at a time, and gathers the bytes to be sent. It knows frames, contents and the order things may come in, and nothing of
exchanges, users or sockets. Because events are yielded while the bytes are walked, what the owner does about one event
(close a channel, say) already holds for the next one of the same buffer.

    socket ─> connection ─> session.receive(bytes) ─> events ─> channel ─> broker's VHost
                  ^                                                │            │
                  └── one write a turn <── session.outgoing <──────┴── confirms, deliveries

| file | what it knows |
| --- | --- |
| `frames` | the frame, and content cut into frames |
| `methods`, `method_codec` | every method and its arguments; bytes to methods and back |
| `states` | which method may come in which phase of a connection |
| `content` | a message in pieces on its way in |
| `session` | the walk over the bytes; the fast path of publishes |
| `sasl`, `tuning`, `capabilities` | what is said in the handshake |
| `errors` | reply codes, faults, and the table from Basalt's errors to them |
| `outbox` | deliveries, confirms and returns as bytes |
| `connection`, `server` | asyncio: sockets, heartbeats, backpressure |
| `channel` and its parts | the methods, done by the broker |

Faults of the peer end a channel or the connection with the code clients branch on; they never raise out of the session.
Misuse on our side raises `LocalProtocolError`.
"""
