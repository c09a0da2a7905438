"""The coordinator: which engines are alive, and their load. Sees no token, and no request needs it."""
