"""Anthropic's Messages API: its bodies as chats, and the answers to these as messages and events."""
