"""Images and sounds in prompts: their bytes, the inputs of a model's encoder, their positions in a prompt.

Knows no engine and no request. `processing` runs in text workers alone.
"""
