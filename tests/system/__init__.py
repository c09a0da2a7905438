"""Real processes, real gRPC, real checkpoints: what a user of the whole stack would try."""
