"""Lifetime of the process: start, engine thread, watchdog, exit codes.
Must not import requests or messages.
"""
