"""Plumbing every service shares: configuration, errors, telemetry, servers, channels. Knows no tokens."""
