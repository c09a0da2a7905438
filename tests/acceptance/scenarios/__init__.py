"""One module or folder for each scenario of `python -m tests.acceptance`, with `add_options` and `run`."""
