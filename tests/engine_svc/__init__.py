"""Tests of the engine service, mirroring its tree."""
