"""Users, passwords, permissions, TLS, and limits on logins."""
