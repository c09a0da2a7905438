"""Tests of loading and of the forward."""
