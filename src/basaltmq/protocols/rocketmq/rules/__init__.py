"""Rules of the RocketMQ protocol without I/O: names, messages, digests, filters, signatures, handles, status codes."""
