"""One module or folder for each scenario of `python -m benchmarks`, with `add_options` and `run`.

A scenario measures and returns a report; the runner prints, writes, draws it and decides on the exit code.
"""
