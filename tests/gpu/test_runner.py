"""The runner on the GPU: recorded steps, a batch's other rows, and no wait for the device."""

from __future__ import annotations

import pytest
import torch

from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.thinking_budget.extras import ThinkingBudget
from engine_svc.runner.cuda_graphs import CudaRecorder
from engine_svc.runner.model_runner import ModelRunner
from engine_svc.runner.running_step import RunningStep
from tests.engine_svc.features.prompt_embeds.test_runner import add_embedded
from tests.engine_svc.runner.chains import Chain, ChainRows
from tests.engine_svc.runner.fakes import LogitsOfAllRows
from tests.engine_svc.runner.test_model_runner import prompt_of, run_in_random_steps

pytestmark = pytest.mark.gpu
NUM_TOKENS = 32
LENGTHS = [1, 3, 17, 40, 70]


class LogitsLog:
    """Keeps the logits that each row was sampled from, in order."""

    def __init__(self) -> None:
        self.of_row: dict[int, list[torch.Tensor]] = {}

    def __call__(self, logits: torch.Tensor, rows) -> None:
        for row, row_logits in zip(rows.tolist(), logits.clone(), strict=True):
            self.of_row.setdefault(row, []).append(row_logits)


class WatchedRunner:
    """A runner in which, once it is watched, whatever waits for the device raises."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.is_watching = False

    def execute(self, plan: StepPlan) -> RunningStep:
        torch.cuda.set_sync_debug_mode("error" if self.is_watching else "default")
        try:
            return self._runner.execute(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def streams_of(driver, prompts) -> dict[str, list[int]]:
    """What each prompt is continued with in steps of random company."""
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    run_in_random_steps(driver, num_tokens=NUM_TOKENS, seed=3, preempt=True)
    return {name: driver.requests[name].output_token_ids for name in prompts}


@pytest.mark.parametrize(
    ("family", "model_impl"),
    [("llama", "native"), ("qwen3_moe", "native"), ("mistral", "native"), ("gemma3", "transformers")],
)
def test_recorded_steps_produce_the_same_tokens(gpu_model, family, model_impl):
    model = gpu_model(family, model_impl, True)
    prompts = {f"r{index}": prompt_of(length, seed=index) for index, length in enumerate(LENGTHS)}
    plain = streams_of(model.driver(model.runner()), prompts)
    assert streams_of(model.driver(model.runner(has_graphs=True)), prompts) == plain


def test_a_recording_does_its_work_again_on_new_numbers(device):
    source, target = torch.zeros(4, device=device), torch.zeros(4, device=device)
    replay = CudaRecorder()(lambda: target.copy_(source).add_(1))
    source.fill_(5.0)
    replay()
    assert target.tolist() == [6.0] * 4


def test_all_recordings_run_on_one_stream_that_no_others_use(device):
    streams = []
    record = CudaRecorder()
    for _ in range(2):
        record(lambda: streams.append(torch.cuda.current_stream()))
    # Each was run once and recorded once.
    assert len(streams) == 4 and all(stream == streams[0] for stream in streams)
    assert streams[0] != torch.cuda.current_stream()


def test_a_model_names_its_gpu_by_number(gpu_model):
    # Engines that share experts connect by it.
    assert gpu_model("llama", "native").ours.device == torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mistral"])
def test_deterministic_logits_are_the_same_bits_alone_in_company_and_in_chunks(gpu_model, family):
    model = gpu_model(family, "native", True)
    prompt = prompt_of(70, seed=1)
    whole = logits_of(model, prompt, chunks=[70], num_others=0)
    for chunks, num_others in (([70], 6), ([16, 54], 0), ([1, 33, 36], 3), ([7] * 10, 6)):
        other = logits_of(model, prompt, chunks=chunks, num_others=num_others)
        assert torch.equal(other, whole), f"chunks {chunks} beside {num_others} others"


def logits_of(model, prompt, *, chunks: list[int], num_others: int) -> torch.Tensor:
    """[12, V] the logits that the prompt's first tokens are sampled from."""
    log = LogitsLog()
    driver = model.driver(model.runner(features=(LogitsOfAllRows(log),)))
    others = [f"other{index}" for index in range(num_others)]
    driver.add("it", prompt)
    for index, name in enumerate(others):
        driver.add(name, prompt_of(5 + 9 * index, seed=50 + index))
    for chunk in chunks:
        pending = {name: driver.requests[name].num_pending_tokens for name in others}
        driver.step({"it": chunk, **pending})
    for _ in range(11):
        driver.step(dict.fromkeys(["it", *others], 1))
    # It entered first, so its row is the first that was free; its samples begin with the last chunk.
    return torch.stack(log.of_row[0])


SAMPLING_OPTIONS = [
    {},
    {"temperature": 0.8, "top_k": 7, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1},
]


def test_a_decode_step_is_launched_without_waiting_for_the_device(gpu_model):
    model = gpu_model("llama", "native", False)
    runner = WatchedRunner(model.runner(has_graphs=True))
    driver = model.driver(runner)
    for index, options in enumerate(SAMPLING_OPTIONS):
        driver.add(f"r{index}", prompt_of(10, seed=index), **options)
    driver.step(dict.fromkeys(driver.requests, 10))
    # Whatever is compiled or allocated once is so now.
    driver.step(dict.fromkeys(driver.requests, 1))
    runner.is_watching = True
    result = driver.step(dict.fromkeys(driver.requests, 1))
    assert all(len(tokens) == 1 for tokens in result.sampled)


def test_requests_are_admitted_without_waiting_for_the_device(gpu_model):
    model = gpu_model("llama", "native", False)
    runner = WatchedRunner(model.runner(has_graphs=True, takes_embeds=True))
    driver = model.driver(runner)
    prompt, budget = prompt_of(10, seed=1), ThinkingBudget(2, (5, 6), (7, 8))
    for runner.is_watching in (False, True):
        for index, options in enumerate([*SAMPLING_OPTIONS, {"thinking": budget}]):
            driver.add(f"r{index}", prompt_of(10, seed=index), **options)
        add_embedded(driver, model, "embedded", prompt, [0, 3, 4])
        result = driver.step(dict.fromkeys(driver.requests, 10))
        assert all(len(tokens) == 1 for tokens in result.sampled)
        for name in list(driver.requests):
            driver.finish(name)


class LateRunner:
    """A runner whose results are read when all steps have been launched. Until then a token is 0."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._num_sampling = 0
        self.steps: list[RunningStep] = []

    def execute(self, plan: StepPlan) -> LateRunner:
        self.steps.append(self._runner.execute(plan))
        self._num_sampling = len(plan.request_ids)
        return self

    def result(self) -> StepResult:
        return StepResult(0, [[0]] * self._num_sampling)


def test_chains_hold_where_no_result_is_read_before_the_next_step(gpu_model):
    model = gpu_model("llama", "native", False)
    feature, chain = ChainRows(model.ours.facts.vocab_size), Chain(3, blocker="")
    runner = LateRunner(model.runner(features=(feature,), has_graphs=True))
    driver = model.driver(runner)
    driver.add("free", prompt_of(5, seed=1))
    prompt = driver.add("chained", prompt_of(7, seed=2)).token_ids.copy()
    driver.requests["chained"].extras[Chain] = chain
    driver.step({"free": 5, "chained": 7})
    for _ in range(3):
        driver.step({"free": 1, "chained": 1})
    tokens = [step.result().sampled[1][0] for step in runner.steps]
    assert len(tokens) == 4
    assert chain.keeps([*prompt, *tokens], len(prompt), feature.vocab_size)
