"""The admin HTTP listener of a service and its pages. Knows no service."""
