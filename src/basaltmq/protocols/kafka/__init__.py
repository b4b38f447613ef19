"""Kafka protocol on the stream plane.

wire/            message schemas by API and version, codecs, error codes, framing
server, connection    listener and TLS; one client connection, responses in request order
context          state that the request handlers share, per virtual host
produce, fetch, fetch_session, list_offsets, read_ahead, arrivals, deadline    the data path
topics, configs, session, scram, scram_users    administration and authentication
groups/          consumer groups (classic and KIP-848) and committed offsets
transactions/    transaction coordinator and producer state
"""
