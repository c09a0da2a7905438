"""Tests of proposers without a model."""
