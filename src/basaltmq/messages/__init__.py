"""The message store: content once, entries per queue, prepared branches, recovery."""
