"""The command line, the supervisor behind `triptych serve`, the offline `LLM`, and the embedded model."""
