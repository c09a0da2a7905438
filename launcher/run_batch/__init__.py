"""The verb `run-batch`: files of requests. Must not know the insides of a service."""
