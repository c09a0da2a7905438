"""Parsers of a model's output text: content, reasoning and tool calls, in the format of each model family.

And the tools that a chat declares, whose calls these are. Must not know prompts and models.
"""
