"""The life of the process: run, and several workers on one port.
Must not know requests.
"""
