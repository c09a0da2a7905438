"""The engine: schedules tokens over a paged KV cache and runs the model. Knows no text."""
