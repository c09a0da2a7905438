"""The life of the process: start, engine thread, watchdog, exit codes.
Must not know requests or messages.
"""
