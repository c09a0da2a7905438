"""What a model's text means: content, reasoning and tool calls, as it was trained to write them."""
