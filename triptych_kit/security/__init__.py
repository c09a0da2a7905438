"""Who may call a service: identities, the credentials that prove them, TLS, and the rules of access."""
