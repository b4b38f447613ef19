"""LITE messages: lite topics inside a topic, and the subscriptions of clients to them."""
