"""Tests of a step on the device."""
