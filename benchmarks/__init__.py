"""`python -m benchmarks` lists and runs scenarios, `python -m benchmarks.paired` compares two versions.

Scenarios share a runner (`__main__`), a report (`report.py`), a plot (`plot.py`) and processes (`rig/`).
"""
