"""Logits at a place depend on nothing but weights and the tokens before: a table, printed with -s.

The default mode on a CPU with native kernels. Every line runs the real scheduler, cache and runner.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine_svc.model.loading.loader import LoadedModel
from tests.engine_svc.model.transformers.core_rig import CoreDriver, load
from tests.system.checkpoints import VOCAB_SIZE, make_checkpoint
from triptych_kernels.cpu.loader import find_isa

NUM_TOKENS = 24
PROMPT_LENGTH = 300


def prompt_of(length: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(3, VOCAB_SIZE) for _ in range(length)]


PROMPT = prompt_of(PROMPT_LENGTH, seed=0)


def observed(driver: CoreDriver, company: dict[str, list[int]]) -> tuple[list[int], torch.Tensor]:
    """The tokens of the request that is looked at, and the logits that they were chosen from."""
    tokens = driver.generate({**company, "observed": PROMPT}, NUM_TOKENS)["observed"]
    return tokens, torch.stack(driver.recorder.logits["observed"][-NUM_TOKENS:])


def company_of(size: int) -> dict[str, list[int]]:
    return {f"other-{index}": prompt_of(5 + 11 * index % 200, seed=index + 1) for index in range(size)}


def situations(loaded: LoadedModel) -> Iterator[tuple[str, Callable[[], CoreDriver], int]]:
    """A name, what makes the driver, and how many others run beside the observed request."""
    yield "alone, one step in flight", lambda: CoreDriver(loaded, depth=1), 0
    for size in (2, 8, 16, 64):
        yield f"in a batch of {size}", lambda: CoreDriver(loaded, num_blocks=2048), size - 1
    for size in (16, 37, 128, 512):
        yield f"in chunks of {size}", functools.partial(CoreDriver, loaded, max_num_batched_tokens=size), 0
    yield "with blocks of 32", lambda: CoreDriver(loaded, block_size=32), 0


@pytest.fixture(
    scope="module",
    params=[
        *(
            (architecture, "native", dtype, "auto")
            for architecture in ("llama", "qwen2", "mixtral")
            for dtype in ("float32", "bfloat16")
        ),
        # Between the kernels these compute with torch, whatever the type is.
        ("llama", "transformers", "bfloat16", "auto"),
        ("gpt2", "transformers", "float32", "auto"),
        ("mixtral", "transformers", "bfloat16", "auto"),
        ("gpt_oss", "transformers", "float32", "auto"),
        *(("llama", "native", "bfloat16", cpu_isa) for cpu_isa in ("avx512", "avx2")),
    ],
    ids="-".join,
)
def loaded(request, tmp_path_factory) -> LoadedModel:
    architecture, model_impl, dtype, cpu_isa = request.param
    found = None if cpu_isa == "auto" else find_isa(cpu_isa)
    if cpu_isa != "auto" and (found is None or found.name != cpu_isa):
        pytest.skip(f"this CPU has no {cpu_isa}")
    folder: Path = tmp_path_factory.mktemp(architecture)
    model = load(make_checkpoint(architecture, folder), model_impl, dtype, cpu_isa)
    if not model.ops.is_batch_invariant:
        pytest.skip("this machine has no native kernels")
    return model


def test_the_same_logits_bit_by_bit_in_every_situation(loaded):
    tokens, logits = observed(CoreDriver(loaded), {})
    assert len(set(tokens)) >= 10
    print(f"\n{loaded.facts.architecture}, {loaded.implementation}, {loaded.facts.dtype}, {loaded.ops.name}")
    for name, make_driver, num_others in situations(loaded):
        driver = make_driver()
        report(name, driver, observed(driver, company_of(num_others)), (tokens, logits))
    preempted = CoreDriver(loaded, num_blocks=54, max_num_batched_tokens=128)
    # The last request gives way first.
    result = observed(preempted, {f"other-{index}": prompt_of(250, seed=index + 1) for index in range(2)})
    assert preempted.num_preemptions > 0
    report("preempted", preempted, result, (tokens, logits))
    hit = CoreDriver(loaded)
    hit.generate({"before": PROMPT}, 8)
    result = observed(hit, {})
    assert hit.num_cached_tokens >= 288
    report("on a prefix hit", hit, result, (tokens, logits))


def report(
    name: str,
    driver: CoreDriver,
    found: tuple[list[int], torch.Tensor],
    expected: tuple[list[int], torch.Tensor],
) -> None:
    """Print the line of a situation, and hold it to the promise."""
    difference = (found[1] - expected[1]).abs().max().item()
    is_equal = torch.equal(found[1], expected[1])
    print(
        f"  {name:28} bitwise {'equal' if is_equal else 'DIFFERENT'}, largest difference {difference:.1e}, "
        f"chunks {driver.num_chunks}, preemptions {driver.num_preemptions}, cached {driver.num_cached_tokens}"
    )
    assert is_equal
    assert found[0] == expected[0]
