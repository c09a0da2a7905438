"""Turns the configuration into objects; the only folder that asks it. One builder a side: engine, runner,
ranks, data parallel. Must not know steps or requests.
"""
