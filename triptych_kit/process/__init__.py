"""The life of a process and of its children: setup, start, supervision, stack dumps. Knows no service."""
