"""Protos to the coordinator's own types and back, and limits of received numbers. Must not know sessions."""
