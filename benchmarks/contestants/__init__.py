"""Programs that generate on request and tell how long it took, one a system that is compared.

Each reads jobs as JSON lines from its standard input and answers each with one line; see jobs.py.
"""
