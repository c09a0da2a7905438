"""Servicers of the public contract: thin, each method hands over to the core."""
