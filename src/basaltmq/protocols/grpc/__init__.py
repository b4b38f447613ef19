"""gRPC over our HTTP/2, on asyncio: a server for handlers that know nothing of it, and a channel for clients."""
