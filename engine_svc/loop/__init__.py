"""The engine thread: the loop, its mailbox, output routing, step recovery, pause and sleep.
Must not know gRPC, protos, torch or any feature.
"""
