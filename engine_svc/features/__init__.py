"""Optional features, a folder each. Only `engine_svc.build` imports them, `engine_svc.config` their flags.

A folder has up to three halves: `wire.py` (asyncio side), `scheduler.py` (engine thread), `runner.py` (device
side, in every rank), each with `make`. `extras.py` has the plain data that they share, and in `EXTRAS` the
types that reach the ranks; `options.py` has the feature's own flags.
"""

from importlib.metadata import entry_points

# The order is the order of application: what forces a token comes after the rules that it overrides, and
# before the language that the output has to keep.
FEATURES = (
    "request_events",
    "request_spans",
    "kv_events",
    "kv_residency",
    "log_steps",
    "sched_trace",
    "nan_counts",
    "adapters",
    "pins",
    "prompt_embeds",
    "media",
    "prompt_logprobs",
    "pooling",
    "forward_outputs",
    "token_rules",
    "penalties",
    "thinking_budget",
    "structured_output",
)

_ENTRY_POINTS = "triptych.features"


def packages() -> list[str]:
    """The packages of all features, those of other installed packages last."""
    offered = sorted(entry_points(group=_ENTRY_POINTS), key=lambda entry: entry.name)
    return [f"{__name__}.{name}" for name in FEATURES] + [entry.value for entry in offered]
