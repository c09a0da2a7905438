"""All on one machine: the command line, the supervisor behind `triptych serve`, and the embedded model."""
