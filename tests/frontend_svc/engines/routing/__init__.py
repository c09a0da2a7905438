"""Tests of `frontend_svc/engines/routing`."""
