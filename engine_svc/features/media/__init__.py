"""Images and sound in prompts: an encoder's outputs in the place of placeholder tokens.

scheduler.py limits how many outputs a step computes, and decides which are kept for later requests with the
same content: the spans of a request name its items. Content that a step needs for the first time is encoded
as a whole, before the first of its positions is computed.
"""
