"""Kafka protocol on the stream plane.

| file | content |
| --- | --- |
| `wire/` | message schemas by API and version, codecs, error codes, framing |
| `server`, `connection`, `session` | listener; one client connection, responses in request order; login |
| `context` | state that the request handlers share, per virtual host |
| `produce`, `fetch`, `list_offsets` | the data path |
| `fetch_state/` | state of fetches: sessions, waits for new records, deadlines, read-ahead |
| `admin/` | topics, configs, the cluster, SCRAM credentials |
| `groups/` | consumer groups (classic and KIP-848) and committed offsets |
| `transactions/` | transaction coordinator and producer state |
"""
