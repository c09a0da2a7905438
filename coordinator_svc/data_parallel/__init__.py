"""Data-parallel groups: formation, waves, commands.
Must not know streams; `group` and `groups` alone know protos.
"""
