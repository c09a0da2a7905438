"""Tests of the engine's optional features, mirroring their folder."""
