"""Tokens that are allowed, banned or favoured: `allowed_token_ids`, `bad_words`, `logit_bias`."""
