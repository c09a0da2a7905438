"""The training of the embedded model: its text, its tokenizer, its weights and the figures of its card."""
