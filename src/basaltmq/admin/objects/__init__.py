"""Admin routes for queues, exchanges, users, vhosts, policies and definitions."""
