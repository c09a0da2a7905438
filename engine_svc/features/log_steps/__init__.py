"""A log line for each step."""
