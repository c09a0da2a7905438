"""Implementations of the contract beside our own, written from `protos/` alone, and wrong ones."""
