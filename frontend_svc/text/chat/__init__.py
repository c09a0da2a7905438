"""Conversations to prompts: chat templates and what they expect.
Must not know engines.
"""
