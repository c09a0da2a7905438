"""Tensors that arrive over the wire: their form, their bytes, and the ways they are transferred."""
