"""Between words and token ids: validating, tokenizing, detokenizing, stop strings."""
