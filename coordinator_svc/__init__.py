"""The coordinator: who is alive and how loaded. Never sees a token, and no request needs it."""
