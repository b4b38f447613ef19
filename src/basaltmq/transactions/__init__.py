"""Transactions on the message store: local ones, and branches of distributed ones."""
