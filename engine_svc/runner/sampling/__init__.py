"""The parts of the sampler: each keeps parameters of some rows, and costs nothing if no row uses it."""
