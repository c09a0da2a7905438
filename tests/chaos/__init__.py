"""Real processes under streams, faults that check they struck, and what the clients saw."""
