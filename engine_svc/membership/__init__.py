"""The stream to the coordinator: registration, load reports, commands, departure. asyncio side.
Must not import frontends' sessions.
"""
