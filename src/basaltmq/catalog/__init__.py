"""The catalog: configured objects, user preferences and durable links. It holds names and rows, no message data."""
