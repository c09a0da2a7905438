"""One step on the device: from a plan to sampled tokens. Knows no scheduler and no request's status."""
