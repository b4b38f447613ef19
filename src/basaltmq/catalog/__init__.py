"""The catalog: what is configured, who prefers what, which links are durable. Names and rows, no message data."""
