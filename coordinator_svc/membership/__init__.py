"""Who is alive and how loaded: registry, loads, topology, publisher, and the sessions of engines and
frontends. Must not know tokens.
"""
