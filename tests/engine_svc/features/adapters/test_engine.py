"""Requests with adapters in one engine: what the model answers with their additions in its weights."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine_svc.build.engine import build_engine, build_served_engine
from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext
from engine_svc.core.request import FinishReason, Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.loop.mailbox import Add, Call, Stop
from tests.engine_svc.features.adapters.folders import (
    MLP_AND_ATTENTION,
    make_text_part,
    rename_modules,
    write_adapter,
    write_merged,
    write_model,
)
from tests.engine_svc.loop.frontend import Frontend
from tests.engine_svc.model.checkpoints import VOCAB_SIZE
from triptych.engine.v1 import add_pb2
from triptych_kit.errors import NotFound

NUM_TOKENS = 24
PROMPTS = [[5, 9, 23, 7], [11, 3], list(range(20, 60)), [77, 78, 79, 80, 81, 82, 83]]


@dataclass
class Rig:
    """An engine; `answers` sends requests of one prompt with an adapter each, or none, together."""

    served: Any
    core: Any
    frontend: Frontend = field(default_factory=Frontend)
    num_sent: int = 0

    def request(self, prompt: list[int], adapter: str, **options: Any) -> Request:
        sampling = SamplingParams(**{"max_tokens": NUM_TOKENS, "temperature": 0.0} | options)
        request = Request(f"r{self.num_sent}", prompt.copy(), len(prompt), sampling, arrival_at=self.num_sent)
        entry = add_pb2.AddEntry(adapter=adapter)
        context = AddContext(self.core.facts, None, prompt)
        for parsed in self.served.features.parse(entry, context):
            request.extras[type(parsed.extra)] = parsed.extra
        request.extra_keys = context.cache_keys
        return request

    def send(self, prompt: list[int], adapter: str, **options: Any) -> int:
        request, handle = self.request(prompt, adapter, **options), self.num_sent
        self.num_sent += 1
        assert self.core.refusal(request) is None
        self.core.prepare(request)
        self.served.inbox.put(Add(request, self.frontend.outbox, handle))
        return handle

    def answers(self, asked: list[tuple[list[int], str]], **options: Any) -> list[list[int]]:
        handles = [self.send(prompt, adapter, **options) for prompt, adapter in asked]
        self.frontend.read_until_ended(self.num_sent)
        assert {self.frontend.end_of[handle].reason for handle in handles} == {FinishReason.LENGTH}
        return [self.frontend.tokens[handle] for handle in handles]

    def collective(self, name: str) -> list[str]:
        """What every rank answers."""
        answer: Future[list[str]] = Future()
        controls = self.core.controls

        def work() -> None:
            answer.set_result(controls.run_collective(name, {}))

        self.served.inbox.put(Call(lambda: controls.serve(work)))
        return answer.result(30)


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[Rig]:
    config = EngineConfig(**{
        "model": str(model), "dtype": "float32", "num_threads": 1, "num_kv_blocks": 200, "max_model_len": 120,
        "max_num_seqs": 16, "block_size": 4, **options,
    })  # fmt: skip
    served = build_served_engine(config)
    loop, core = build_engine(config, served, progress=lambda progress: None, defer=lambda work: None)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield Rig(served, core)
    finally:
        served.inbox.put(Stop())
        thread.join()


def answers_of(model: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    with engine(model, **options) as rig:
        return rig.answers([(prompt, "") for prompt in prompts])


DELTA_RULE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
CASES = {
    "llama": ("llama", "native", MLP_AND_ATTENTION, {}),
    "llama in transformers": ("llama", "transformers", MLP_AND_ATTENTION, {}),
    "qwen2 with biases": ("qwen2", "native", (*MLP_AND_ATTENTION, "lm_head", "embed_tokens"), {}),
    "qwen3 attention alone": ("qwen3", "native", ("q_proj", "v_proj"), {"use_rslora": True}),
    "gemma3": ("gemma3", "native", (*MLP_AND_ATTENTION, "embed_tokens"), {}),
    "granite": ("granite", "native", MLP_AND_ATTENTION, {}),
    "olmo3": ("olmo3", "native", MLP_AND_ATTENTION, {}),
    "phi3 joined": ("phi3", "native", ("qkv_proj", "gate_up_proj", "o_proj"), {}),
    "qwen3_moe attention": ("qwen3_moe", "native", ("q_proj", "k_proj", "o_proj"), {}),
    "qwen3_5": ("qwen3_5", "native", (*MLP_AND_ATTENTION, *DELTA_RULE), {}),
    "granitemoehybrid": (
        "granitemoehybrid", "native", ("q_proj", "v_proj", "in_proj", "out_proj", "input_linear"), {},
    ),
    "qwen3_next": ("qwen3_next", "transformers", ("q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"), {}),
    "gpt2": ("gpt2", "transformers", ("c_attn", "c_fc"), {"fan_in_fan_out": True}),
    "patterns": (
        "llama", "native", MLP_AND_ATTENTION,
        {"rank_pattern": {"q_proj": 3, "down_proj": 5}, "alpha_pattern": {"v_proj": 40}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_batch_mixes_adapters_and_the_model(tmp_path, case):
    family, model_impl, modules, config = case
    model = write_model(family, tmp_path / "model")
    named = {
        name: write_adapter(tmp_path / name, model, seed=seed, rank=rank, modules=modules, **config)
        for seed, (name, rank) in enumerate((("a", 4), ("b", 16), ("c", 8)), start=1)
    }
    options = {"model_impl": model_impl}
    wanted = {"": answers_of(model, PROMPTS, **options)}
    for name, folder in named.items():
        merged = write_merged(tmp_path / f"merged {name}", model, folder)
        wanted[name] = answers_of(merged, PROMPTS, **options)
    assert len({tuple(each) for each in wanted.values() for each in map(tuple, each)}) == 4 * len(PROMPTS)
    flags = tuple(f"{name}={folder}" for name, folder in named.items())
    with engine(model, enable_lora=True, lora_modules=flags, **options) as rig:
        asked = [(index, name) for name in ("", "a", "b", "c") for index in range(len(PROMPTS))]
        found = rig.answers([(PROMPTS[index], name) for index, name in asked])
        for (index, name), answer in zip(asked, found, strict=True):
            assert answer == wanted[name][index], (name, index)
        # Alone, with the prefix of the first time in the cache.
        for name in ("b", ""):
            assert rig.answers([(PROMPTS[2], name)]) == [wanted[name][2]]
    tokens = {token for answers in wanted.values() for answer in answers for token in answer}
    assert len(tokens) >= 20 or VOCAB_SIZE < 40


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_adapters_of_a_text_part_name_its_modules_as_either_class_does(tmp_path, model_impl):
    model = write_model("qwen3_5", tmp_path / "model")
    modules = ("q_proj", "in_proj_qkv", "down_proj")
    adapters = [write_adapter(tmp_path / name, model, seed=ord(name), modules=modules) for name in "ab"]
    wanted = {
        adapter.name: answers_of(write_merged(tmp_path / f"merged {adapter.name}", model, adapter), PROMPTS)
        for adapter in adapters
    }
    make_text_part(model)
    rename_modules(adapters[1], "model.", "model.language_model.")
    flags = tuple(f"{adapter.name}={adapter}" for adapter in adapters)
    with engine(model, enable_lora=True, lora_modules=flags, model_impl=model_impl) as rig:
        for name, answers in wanted.items():
            assert rig.answers([(prompt, name) for prompt in PROMPTS]) == answers


DIVIDED = {
    "two tensor-parallel ranks": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("division", DIVIDED.values(), ids=DIVIDED)
def test_ranks_hold_their_shares_of_an_adapter(tmp_path, division):
    model = write_model("qwen2", tmp_path / "model")
    modules = (*MLP_AND_ATTENTION, "lm_head", "embed_tokens")
    adapters = [write_adapter(tmp_path / name, model, seed=ord(name), modules=modules) for name in "ab"]
    wanted = {"": answers_of(model, PROMPTS)}
    for adapter in adapters:
        merged = write_merged(tmp_path / f"merged {adapter.name}", model, adapter)
        wanted[adapter.name] = answers_of(merged, PROMPTS)
    flags = tuple(f"{adapter.name}={adapter}" for adapter in adapters)
    with engine(model, enable_lora=True, lora_modules=flags, **division) as rig:
        for name, answers in wanted.items():
            assert rig.answers([(prompt, name) for prompt in PROMPTS]) == answers
        mixed = [(prompt, name) for prompt in PROMPTS for name in ("b", "", "a")]
        assert rig.answers(mixed) == [wanted[name][PROMPTS.index(prompt)] for prompt, name in mixed]
        with pytest.raises(NotFound, match="adapter 'c' is not loaded"):
            rig.request(PROMPTS[0], "c")


@pytest.mark.parametrize("num_stages", [1, 2])
def test_additions_to_a_router_are_refused(tmp_path, num_stages):
    model = write_model("qwen3_moe", tmp_path / "model")
    folder = write_adapter(tmp_path / "a", model, seed=1, modules=("q_proj", "gate"))
    options = {"pipeline_parallel_size": num_stages, "lora_modules": (f"a={folder}",)}
    with engine(model, enable_lora=True, **options) as rig:
        handle = rig.send(PROMPTS[0], "a")
        rig.frontend.read_until_ended(1)
        end = rig.frontend.end_of[handle]
    assert (end.reason, end.code) == (FinishReason.ERROR, "INVALID_ARGUMENT")
    assert re.search(r"adapter a has additions to \S+\.mlp\.gate, .*which take none here", end.message)


def test_more_adapters_than_fit_in_memory_are_served_in_turns(tmp_path):
    model = write_model("llama", tmp_path / "model")
    names = [f"a{number}" for number in range(6)]
    flags = tuple(
        f"{name}={write_adapter(tmp_path / name, model, seed=number)}" for number, name in enumerate(names)
    )
    wanted = {}
    for name in names:
        with engine(model, enable_lora=True, lora_modules=flags) as rig:
            wanted[name] = rig.answers([(PROMPTS[0], name)])[0]
    assert len({tuple(answer) for answer in wanted.values()}) == len(names)
    options = {"max_loras": 2, "max_cpu_loras": 3, "max_num_batched_tokens": 8, "num_kv_blocks": 40}
    with engine(model, enable_lora=True, lora_modules=flags, **options) as rig:
        asked = [names[number * 7 % 6] for number in range(30)]
        assert rig.answers([(PROMPTS[0], name) for name in asked]) == [wanted[name] for name in asked]
        rig.answers([(PROMPTS[0], name) for name in names[:3]])
        (in_memory,) = rig.collective("adapters")
    assert re.fullmatch(r"[1-3] in memory, [1-4] at most so far, [0-2] in slots", in_memory)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_an_adapter_that_was_changed_after_its_request_ends_that_with_a_status(tmp_path, is_replaced):
    model = write_model("llama", tmp_path / "model")
    folder = write_adapter(tmp_path / "a", model, seed=1)
    with engine(model, enable_lora=True, lora_modules=(f"a={folder}",)) as rig:
        shutil.rmtree(folder)
        if is_replaced:
            write_adapter(folder, model, seed=2)
        handle = rig.send(PROMPTS[0], "a")
        other = rig.send(PROMPTS[0], "")
        rig.frontend.read_until_ended(2)
        end = rig.frontend.end_of[handle]
        assert end.reason is FinishReason.ERROR
        assert (end.code, end.error_reason) == ("FAILED_PRECONDITION", "ADAPTER_CHANGED")
        assert rig.frontend.end_of[other].reason is FinishReason.LENGTH


def test_blocks_of_another_adapter_or_of_the_model_are_no_prefix(tmp_path):
    model = write_model("llama", tmp_path / "model")
    flags = tuple(f"{name}={write_adapter(tmp_path / name, model, seed=ord(name))}" for name in "ab")
    with engine(model, enable_lora=True, lora_modules=flags) as rig:
        cached = []
        for name in ("a", "b", "", "a", "b", ""):
            handle = rig.send(PROMPTS[2], name)
            rig.frontend.read_until_ended(rig.num_sent)
            cached.append(rig.frontend.cached[handle])
        assert cached[:3] == [0, 0, 0]
        assert min(cached[3:]) >= 36
