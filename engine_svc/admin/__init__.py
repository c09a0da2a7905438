"""What the engine reports about itself, and the utility calls that operators and frontends may make.
asyncio side. Must not import the scheduler or tensors.
"""
