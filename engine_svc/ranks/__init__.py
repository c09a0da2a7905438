"""One model over several processes: plan channel, codecs, rank loop, watch.
Must not know the scheduler, the cache or the wire.
"""
