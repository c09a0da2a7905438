"""A frontend's connection: servicer, session, replay, admission of its requests. asyncio side.
Must not import tensors or the scheduler.
"""
