"""Paged KV book-keeping: which blocks belong to which request. Knows no tensors and no clock."""
