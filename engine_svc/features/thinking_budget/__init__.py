"""A limit on the tokens of each reasoning block."""
