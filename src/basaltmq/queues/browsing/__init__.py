"""Reads the messages of a queue without leasing them."""
