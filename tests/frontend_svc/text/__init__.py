"""Tests of `frontend_svc/text`."""
