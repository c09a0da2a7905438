"""Every order of messages, crashes and restarts that a small lockstep group can meet, on real machines."""
