"""Tensors that come over the wire: their form, their bytes, and where these were on the way."""
