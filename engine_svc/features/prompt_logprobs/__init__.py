"""Log probabilities of a prompt's own tokens."""
