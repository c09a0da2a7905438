"""Tests that need a CUDA device. They run from a bare checkout: torch, triton, transformers, pytest alone."""
