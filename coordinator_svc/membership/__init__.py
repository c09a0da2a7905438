"""The engines that are alive, and their load: registry, load table, topology, publisher, and the sessions of
engines and frontends. Must not know tokens.
"""
