"""Tests of the native decoders."""
