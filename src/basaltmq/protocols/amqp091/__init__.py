"""AMQP 0-9-1 listener, compatible with RabbitMQ's clients.

Theory of operation. `Session` is the protocol without I/O. It takes the bytes of a connection, yields events one at a
time, and collects the bytes to send. It knows frames, contents and the valid order of methods. It does not know
exchanges, users or sockets. Events are yielded while the buffer is parsed. So the effect of one event (a closed
channel, for example) already applies to the next event of the same buffer.

    socket ─> connection ─> session.receive(bytes) ─> events ─> channel ─> broker's VHost
                  ^                                                │            │
                  └── one write per turn <── session.outgoing <────┴── confirms, deliveries

| file | content |
| --- | --- |
| `wire/frames` | frame layout; content split into frames |
| `wire/methods`, `wire/method_codec` | table of methods and arguments; encoding and decoding |
| `wire/states` | phases of connections and channels, and the methods valid in each |
| `wire/content` | assembly of a message from its frames |
| `wire/errors` | reply codes, faults, and the mapping from Basalt's errors |
| `session`, `events` | parser and its events; fast path for publishes |
| `sasl`, `tuning`, `capabilities` | parts of the handshake |
| `connection`, `server`, `input` | asyncio: sockets, heartbeats, backpressure, fairness |
| `channel`, `consuming`, `topology`, `transactions` | method handlers |
| `subscriptions`, `unacked`, `confirms`, `reply_to` | state of a channel |
| `outbox` | encoding of deliveries, returns and confirms |

A fault of the peer closes a channel or the connection with the reply code that clients check. It never raises out of
the session. Misuse on the server side raises `LocalProtocolError`.
"""
