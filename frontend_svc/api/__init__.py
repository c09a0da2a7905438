"""gRPC servicers of the public API: thin translations to `Generation`, `Pooling` and the directory.
Must not talk to engines.
"""
