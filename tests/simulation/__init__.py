"""Random workloads, with every invariant checked after every step."""
