"""Counts the logits that are not numbers, of requests that end for them."""
