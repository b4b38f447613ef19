"""Kafka's protocol on the stream plane.

schema    the types of the wire, and codecs derived from tables of fields
apis_*    one table for each request and response, by version
api       which of them are announced
errors    the one table from our errors to Kafka's codes
connection, server    frames in, answers out, in order; sockets, TLS
session, topics, configs, produce, producers, fetch, groups, group, offsets    what the requests do
consumer_requests, consumer_groups, consumer_group, consumer_member, assignors    groups of the second protocol
"""
