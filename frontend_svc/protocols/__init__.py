"""Other protocols than gRPC: each translates into the public requests and calls the servicers."""
