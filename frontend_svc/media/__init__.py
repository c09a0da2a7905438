"""Images and sounds in prompts: their bytes, the inputs of a model's encoder, their positions in a prompt.

`sources` and `cache` run in the frontend's process; all else, which needs Pillow and numpy, in text workers.
Knows no engine and no request.
"""
