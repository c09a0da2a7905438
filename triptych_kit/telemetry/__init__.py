"""Traces, metrics and logs of a process, and their export by OTLP. Knows no service."""
