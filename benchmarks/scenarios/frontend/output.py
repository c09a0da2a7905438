"""The cost of a token from a step's columns to its reader's buffer, without any gRPC."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from array import array
from collections.abc import Callable

from tokenizers import Tokenizer

from benchmarks.report import Row
from frontend_svc.engines.connection.columns import read_step
from frontend_svc.output.collector import Collector, OutputKind, ReaderLimit
from frontend_svc.output.processor import OutputProcessor
from frontend_svc.output.request_state import RequestState
from frontend_svc.text.detokenizer import Detokenizer
from frontend_svc.text.stop_strings import StopBuffer
from triptych.engine.v1 import step_pb2
from triptych_cli.services import embedded_model

NUM_ROWS = 256
NUM_STEPS = 400
NUM_WARM_STEPS = 40
_FIRST_PLAIN_ID = 300


def measure_output() -> list[Row]:
    """A row for requests of each kind; the median over steps."""
    tokenizer = Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))
    kinds: dict[str, tuple[bool, tuple[str, ...]]] = {
        "token ids": (False, ()),
        "text": (True, ()),
        "text, two stop strings": (True, ("\n\nThe end", "#####")),
    }
    return [
        asyncio.run(_measure(name, _maker(tokenizer, has_text=has_text, stops=stops), tokenizer))
        for name, (has_text, stops) in kinds.items()
    ]


def _maker(
    tokenizer: Tokenizer, *, has_text: bool, stops: tuple[str, ...]
) -> Callable[[Collector], RequestState]:
    def make(collector: Collector) -> RequestState:
        detokenizer = Detokenizer(
            tokenizer, [_FIRST_PLAIN_ID] * 8, special_ids=frozenset(range(5)), skip_special_tokens=True
        )
        return RequestState(
            collector,
            detokenizer if has_text else None,
            StopBuffer(stops, include=False) if stops else None,
            include_stop=False,
            min_tokens=0,
        )

    return make


async def _measure(name: str, make_state: Callable[[Collector], RequestState], tokenizer: Tokenizer) -> Row:
    processor = OutputProcessor(on_end=lambda handle: None)
    collectors = [
        Collector(OutputKind.DELTA, stream_interval=1, limit=ReaderLimit(), on_slow=lambda: None)
        for _ in range(NUM_ROWS)
    ]
    for handle, collector in enumerate(collectors):
        processor.register(handle, make_state(collector))
    rng = random.Random(6)
    reading_us, processing_us = [], []
    num_chars = 0
    for step_number in range(NUM_WARM_STEPS + NUM_STEPS):
        ids = array("I", rng.choices(range(_FIRST_PLAIN_ID, tokenizer.get_vocab_size()), k=NUM_ROWS))
        content = step_pb2.Step(
            step_number=step_number + 1,
            handles=array("I", range(NUM_ROWS)).tobytes(),
            num_tokens=b"\1" * NUM_ROWS,
            token_ids=ids.tobytes(),
        ).SerializeToString()
        began_ns = time.perf_counter_ns()
        columns = read_step(step_pb2.Step.FromString(content))
        read_ns = time.perf_counter_ns()
        processor.process(columns)
        ended_ns = time.perf_counter_ns()
        # As readers that keep up: none of it counts, and no buffer grows.
        for collector in collectors:
            output = await collector.get()
            num_chars += len(output.pieces[0].text)
        if step_number >= NUM_WARM_STEPS:
            reading_us.append((read_ns - began_ns) / 1000 / NUM_ROWS)
            processing_us.append((ended_ns - read_ns) / 1000 / NUM_ROWS)
    return {
        "part": "output",
        "requests": name,
        "num_rows": NUM_ROWS,
        "num_tokens": NUM_ROWS * NUM_STEPS,
        "num_chars": num_chars,
        "reading_us_per_token": statistics.median(reading_us),
        "processing_us_per_token": statistics.median(processing_us),
        "processing_us_per_token_mean": statistics.fmean(processing_us),
    }
