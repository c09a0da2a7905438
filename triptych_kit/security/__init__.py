"""Access control of services: identities, the credentials that prove them, TLS, and the rules of access."""
