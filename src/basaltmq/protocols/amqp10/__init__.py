"""AMQP 1.0 listener: connections, sessions and links over the broker's queues and exchanges.

Theory of operation. `Connection` cuts bytes into frames and passes them to its sessions. A link on which a client sends
(`Receiver`) publishes; a link on which it receives (`Sender`) is a consumer. The codec in `wire` has no I/O. The
frequent frames (transfer, disposition, flow) are decoded into a list of fields and encoded from byte strings.

    socket ─> connection ─> session ─> receiver ─> VHost.publish_many ─> disposition, after the sync
                  ^            │
                  │            └─> sender ─> VHost.subscribe ─> transfers <─ VHost.settle <─ dispositions
                  └── one write per turn <── connection.out

| file | content |
| --- | --- |
| `wire/types`, `wire/performatives` | values; composite types and their fields |
| `wire/frames`, `wire/sections` | frames and the frequent performatives; sections of a message |
| `wire/errors` | error conditions, faults, and the mapping from Basalt's errors |
| `connection`, `server`, `sasl` | asyncio: handshake, backpressure, fairness, timeouts |
| `session`, `link` | windows, delivery ids, dispositions; what all links do |
| `receiver`, `sender`, `coordinator` | links of publishers and consumers; transactions |
| `containers`, `durable_links`, `dynamic_nodes` | what links belong to, what outlives them, and what ends with them |
| `addresses`, `filters`, `message` | nodes of addresses, filters of sources, conversion of messages |

A fault of the client ends only the object that it concerns: a delivery, a link, a session or the connection.
"""
