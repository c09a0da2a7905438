"""The parts of the sampler: each keeps what some rows asked for, and costs nothing where no row did."""
