"""Real processes under streams, faults that prove they struck, and what the clients saw."""
