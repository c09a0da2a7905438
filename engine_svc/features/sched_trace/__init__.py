"""A file of what the scheduler saw and decided in each step, from which the decisions can be replayed."""
