"""Parsers of a model's output text: content, reasoning and tool calls, in the format of each model family."""
