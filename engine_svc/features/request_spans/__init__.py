"""Makes a span of every sampled request, below the span that its frontend names in the ADD.

`wire.py` reads the parent, `scheduler.py` notes the end of the request, and the event loop makes the span and
queues it for the export, whose thread is in triptych_kit. Without a collector no parent is read.
"""
