"""A request's life: admission, generation, failover, drain, tracing.
Must not know protocols of clients or streams of engines.
"""
