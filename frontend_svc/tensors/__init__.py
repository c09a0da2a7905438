"""Sends tensors of requests to engines, as opaque bytes."""
