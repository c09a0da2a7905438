"""Optional features, a folder each, which only `engine_svc.build` imports. The core knows none of them.

A folder has up to three halves: `wire.py` (asyncio side), `scheduler.py` (engine thread), `runner.py` (device
side, in every rank), each with `make`. Its `__init__.py` has what they share: plain data, and in `EXTRAS` the
types that reach the ranks.
"""

# The order is the order of application: what forces a token comes last.
FEATURES = (
    "request_spans",
    "kv_events",
    "log_steps",
    "prompt_embeds",
    "prompt_logprobs",
    "token_rules",
    "penalties",
    "thinking_budget",
)
