"""The broker: virtual hosts, routing, consumers, users, over the planes."""
