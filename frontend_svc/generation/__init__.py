"""Life cycle of a request: admission, generation, failover, drain, tracing.
Must not know protocols of clients or streams of engines.
"""
