"""The verb `run-batch`: files of requests. Must not know the internals of a service."""
