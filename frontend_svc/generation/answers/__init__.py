"""The interface of every protocol: answers to public requests, as streams, whole or resumed.

A protocol translates into the public request and calls these. They know no protocol and talk to no engine.
"""
