"""Engines without a frontend process between: in this process, or one process away."""
