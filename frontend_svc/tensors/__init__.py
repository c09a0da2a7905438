"""Tensors on their way to engines, as bytes that nobody here looks into."""
