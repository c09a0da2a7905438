"""Tests of the paged KV book-keeping."""
