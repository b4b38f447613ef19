"""Messages: operations on them, properties, header tables, death history, stream records."""
