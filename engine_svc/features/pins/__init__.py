"""Pins: blocks of an agent's turn stay while its tool runs, for the job's next turn.

wire.py reads the job of an ADD under the policy that serves jobs; under another it takes the fields and does
nothing. scheduler.py retains the blocks of a turn that ends for as long as estimator.py expects its tool to
run: first for a moment, then, with the frontend's hint, which tool was called, until that instant. The
job's next turn uses the pin; else it expires, or is given up where nothing could be computed otherwise.
"""
