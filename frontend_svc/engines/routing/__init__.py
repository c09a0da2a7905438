"""Routing: policies by name, and the load account of each engine that they decide by.

    accounts = {address: EngineAccount(address) for address in addresses}
    engine = route(find_policy("kv-aware"), [one.info() for one in accounts.values()], request, turn)
    accounts[engine.address].send(handle, request.num_prompt_tokens)

All of it is pure: no clock, no random numbers, no gRPC and no protos, so that a simulation can drive it.
"""
