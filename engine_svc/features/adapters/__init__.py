"""Adapters: low-rank additions to the model's weights, another one for each request.

wire.py knows the adapters by name, from folders that are checked and hashed once; an ADD names one. Its
digest is a key of the request's blocks. scheduler.py lets at most `--max-cpu-loras` different ones be loaded,
in the order of their requests, and at most `--max-loras` be in a step. runner.py loads one beside the steps,
gives it a slot when a step needs it, and tells the forward the slot of each token.
"""
