"""Makes a span of every sampled request, below the span that its frontend names in the ADD.

`wire.py` reads the parent, `scheduler.py` notes when the request ended, and the event loop makes the span and
queues it for the export, whose thread is in triptych_kit. Without a collector nothing is read or noted.
"""
