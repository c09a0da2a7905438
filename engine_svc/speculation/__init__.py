"""Proposers of drafts without a model. They know tokens alone: no device and no scheduler."""
