"""The verbs of the command line that talk to a running server.
Must not know the internals of a service.
"""
