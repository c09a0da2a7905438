"""Embeddings in the place of tokens of a prompt."""
