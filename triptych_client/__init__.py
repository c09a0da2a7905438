"""The Python client of triptych: `client.Client` blocks, `aio.Client` awaits."""
