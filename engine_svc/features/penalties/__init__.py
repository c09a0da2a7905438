"""Presence, frequency and repetition penalties."""
