"""Data-parallel groups: formation, waves, commands.
Must not know streams; only `lockstep_groups` and `commands` know protos.
"""
