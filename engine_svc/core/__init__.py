"""Plain data that every band of the engine shares: request, step, sampling parameters, facts, errors.
Must not know torch, protos or gRPC.
"""
