"""An engine in this process: the loop with everything below it, and nobody on the wire."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence

from engine_svc.admin.served_engine import LoadedCore, ServedEngine
from engine_svc.build.engine import build_engine, build_served_engine
from engine_svc.config import EngineConfig
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Add, Outbox, Stop
from engine_svc.process.run import calm_collector
from service_kit.config import load_config

_OUTBOX_BYTES = 1 << 30
_TIMEOUT_S = 600.0
_SWITCH_INTERVAL_S = 0.0005


class LocalEngine:
    """Takes prompts, gives their continuations. Requests enter and outputs leave as they do with a wire."""

    def __init__(self, served: ServedEngine, engine: Engine, core: LoadedCore) -> None:
        self._served, self._engine, self.core = served, engine, core
        self._thread = threading.Thread(target=engine.run, name="engine")
        self._thread.start()

    @classmethod
    def start(cls, flags: Sequence[str]) -> LocalEngine:
        """Load the model that the engine's flags name, and run its loop."""
        # As the service has it: a thread that waits for the interpreter should not wait long.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        config = load_config(EngineConfig, list(flags), service="engine").config
        served = build_served_engine(config)
        engine, core = build_engine(config, served, progress=lambda _: None, defer=lambda call: call())
        calm_collector()
        return cls(served, engine, core)

    def generate(
        self, prompts: Mapping[str, list[int]], num_output_tokens: int, **wishes: object
    ) -> dict[str, list[int]]:
        """The tokens of each prompt, by request id: exactly so many, greedy unless wished otherwise."""
        woken = threading.Event()
        outbox = Outbox(max_bytes=_OUTBOX_BYTES, wake=woken.set)
        sampling = SamplingParams(
            **{"max_tokens": num_output_tokens, "temperature": 0.0, "ignore_eos": True, **wishes}
        )
        names = list(prompts)
        for handle, name in enumerate(names):
            request = Request(name, list(prompts[name]), len(prompts[name]), sampling)
            refusal = self.core.refusal(request)
            if refusal is not None:
                raise ValueError(f"{name}: {refusal}")
            self.core.prepare(request)
            self._served.inbox.put(Add(request, outbox, handle))
        outputs: dict[str, list[int]] = {name: [] for name in names}
        num_ended = 0
        while num_ended < len(names):
            if not woken.wait(_TIMEOUT_S):
                raise TimeoutError(f"no output for {_TIMEOUT_S} s")
            woken.clear()
            step = outbox.take()
            if step is None:
                continue
            start = 0
            for handle, count in zip(step.handles, step.num_tokens, strict=True):
                outputs[names[handle]] += step.token_ids[start : start + count]
                start += count
            num_ended += len(step.finished)
        return outputs

    def stop(self) -> None:
        """End the loop."""
        self._served.inbox.put(Stop())
        self._thread.join(_TIMEOUT_S)
