"""Turns the configuration into objects; the only folder that reads it. One builder per side: engine, runner,
ranks, data parallel. Must not handle steps or requests.
"""
