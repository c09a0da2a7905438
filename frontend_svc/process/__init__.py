"""Life cycle of the process: a single frontend, or several workers on one port.
Must not know requests.
"""
