"""gRPC over Basalt's own HTTP/2, on asyncio: a server, a client channel, and the broker's services."""
