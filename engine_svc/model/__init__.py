"""Weights and forward: from a checkpoint folder to logits. Knows no scheduler and no request."""
