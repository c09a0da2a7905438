"""Turns conversations into prompts: chat templates and the messages they expect.
Must not import engines.
"""
