"""A whole stack on this machine: the supervisor behind `triptych serve` and its processes.
Must not know requests.
"""
