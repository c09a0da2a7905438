"""Real services under load, for scenarios and for tests of whole stacks.

Knows no scenario and no report.
"""
