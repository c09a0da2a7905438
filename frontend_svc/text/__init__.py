"""From text to token ids and back: validation, tokenizing, chat templates, detokenizing, stop strings."""
