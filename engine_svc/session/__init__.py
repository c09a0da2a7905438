"""A frontend's connection: servicer, session, replay, admission of its requests. asyncio side.
Must not know tensors or scheduling.
"""
