"""The coordinator's stream: registration, load reports, commands, departure. asyncio side.
Must not know frontends' sessions.
"""
