"""Every architecture through the real scheduler, cache and runner: the tokens and logits of transformers.

With chunked prompts, preemptions and prefix hits, two steps in flight, prompts longer than two windows.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from engine_svc.model.errors import UnsupportedModel
from engine_svc.model.loading.folder import read_headers, read_json_object, text_config
from engine_svc.model.loading.loader import LoadedModel, LoadOptions, load_model
from engine_svc.model.loading.states import stated_state_bytes
from engine_svc.runner.memory.state_tensors import bytes_per_slot
from tests.engine_svc.model.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.engine_svc.model.transformers.core_rig import BLOCK_SIZE, CoreRig

NUM_TOKENS = 40
MIN_DISTINCT = 16
NUM_SHARED = 28  # tokens with which two of the prompts begin
TOLERANCE = 1e-4

NATIVE = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "phi3", "qwen3_moe")
OTHERS = (
    "afmoe", "bart", "bigbird_pegasus", "cohere2", "deepseek_v2", "deepseek_v3", "diffllama", "ernie4_5_moe",
    "exaone4", "gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "glm4", "gpt2", "gpt_neox", "gpt_oss",
    "granitemoe", "llama4", "longcat_flash", "mimo_v2", "nemotron", "olmo2", "olmoe", "opt", "phi",
    "qwen2_sliding", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
WITH_STATES = (
    "bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next",
)  # fmt: skip
IMPLEMENTATIONS = [
    *((family, "transformers") for family in (*NATIVE, *OTHERS, *WITH_STATES)),
    *((family, "native") for family in (*NATIVE, "granitemoehybrid", "qwen3_5", "qwen3_5_moe")),
]


def some_prompts(count: int, length: int, *, seed: int, start: list[int] | None = None) -> list[list[int]]:
    choose = random.Random(seed)
    shared = start or []
    return [
        [*shared, *(choose.randrange(3, VOCAB_SIZE) for _ in range(length - len(shared)))]
        for _ in range(count)
    ]


def generated(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Prompts of one length and what transformers continues them with, greedily and past any end."""
    model.generation_config.eos_token_id = None
    # Untyped: the library's own stubs contradict each other about `generate`.
    untyped: Any = model
    return untyped.generate(
        torch.tensor(prompts), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0,
        attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.int64),
    ).tolist()  # fmt: skip


def varied_stream(model: PreTrainedModel, prompts: list[list[int]]) -> list[int]:
    """The first of the prompts whose continuation has enough distinct ids, with it."""
    length = len(prompts[0])
    streams = [each for each in generated(model, prompts) if len(set(each[length:])) >= MIN_DISTINCT]
    assert streams, "every stream falls into a loop: it would not show a mistake"
    return streams[0]


def references(model: PreTrainedModel) -> dict[str, tuple[int, list[int]]]:
    """By name: how long the prompt is, and prompt and continuation. "first" and "shares" begin alike."""
    first = varied_stream(model, some_prompts(8, 33, seed=1))
    shares = varied_stream(model, some_prompts(8, 37, seed=2, start=first[:NUM_SHARED]))
    longest = varied_stream(model, some_prompts(8, 46, seed=3))
    return {"first": (33, first), "shares": (37, shares), "longest": (46, longest)}


@torch.inference_mode()
def worst_difference(
    rig: CoreRig, model: PreTrainedModel, streams: dict[str, tuple[int, list[int]]]
) -> float:
    """Between any logits that the rig computed and those of the eager model at that place."""
    worst = 0.0
    for name, (_, stream) in streams.items():
        expected = model(input_ids=torch.tensor([stream]), use_cache=False).logits[0]
        for place in range(len(stream) - 1):
            computed = rig.logits.get((name, place), [])
            # Places of the shared start may have been computed by the other request alone.
            assert computed or (name == "shares" and place < NUM_SHARED)
            for logits in computed:
                worst = max(worst, float((logits - expected[place]).abs().max()))
    return worst


def run_under_pressure(
    loaded: LoadedModel, streams: dict[str, tuple[int, list[int]]], num_tokens: int = 8
) -> CoreRig:
    """All streams at once, in a pool that cannot hold them, the second when the first's prompt is there.

    num_tokens: at most, of a step.
    """
    rig = CoreRig(loaded, max_model_len=46 + NUM_TOKENS, max_num_batched_tokens=num_tokens, room=1.25)
    for name, (length, stream) in streams.items():
        request = rig.add(name, stream[:length], NUM_TOKENS)
        while name == "first" and request.num_computed_tokens < length:
            rig.step()
    rig.run()
    return rig


Family = tuple[Path, PreTrainedModel, dict[str, tuple[int, list[int]]]]


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """A family's checkpoint, the model that wrote it, and its `references`: made once."""

    @functools.cache
    def make(family: str) -> Family:
        folder = tmp_path_factory.mktemp(family)
        model = make_checkpoint(family, folder)
        return folder, model, references(model)

    return make


@pytest.mark.parametrize(("family", "model_impl"), IMPLEMENTATIONS)
def test_tokens_and_logits_are_those_of_transformers(family_of, family: str, model_impl: str):
    folder, model, streams = family_of(family)
    loaded = load_model(folder, LoadOptions(num_threads=1, model_impl=model_impl))
    limits = [group.window or group.chunk or 0 for group in loaded.facts.groups]
    rig = run_under_pressure(loaded, streams)
    assert loaded.implementation == model_impl
    assert all(length > max(2 * max(limits, default=0), 3 * BLOCK_SIZE) for length, _ in streams.values())
    for name, (_, stream) in streams.items():
        assert rig.requests[name].token_ids == stream
    assert worst_difference(rig, model, streams) < TOLERANCE
    assert min(rig.num_chunks, rig.num_hits) > 0
    # Each running request has a slot for its state: only blocks can be too few.
    assert (rig.num_preemptions > 0) == bool(loaded.facts.groups)
    assert bool(loaded.facts.state_shapes) == (family in WITH_STATES)
    entries = [entry for header in read_headers(folder) for entry in header.entries]
    stated = text_config(read_json_object(folder / "config.json"))
    assert stated_state_bytes(folder, stated, entries) == bytes_per_slot(loaded.facts.state_shapes)


@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_tokens_see_their_chunk_and_have_the_temperature_of_their_position_in_every_step(
    family_of, caplog: pytest.LogCaptureFixture, num_tokens: int
):
    folder, model, streams = family_of("llama4")
    loaded = load_model(folder, LoadOptions(num_threads=1))
    assert [(shape.window, shape.chunk) for shape in loaded.facts.kv_shapes] == [(None, 12), (None, None)]
    assert "logits may differ" not in caplog.text
    rig = run_under_pressure(loaded, streams, num_tokens)
    for name, (_, stream) in streams.items():
        assert rig.requests[name].token_ids == stream
    assert worst_difference(rig, model, streams) < TOLERANCE
    assert rig.num_hits > 0


def test_the_windows_are_those_of_the_layers(tmp_path: Path):
    expected = {
        "gemma2": [7, None],
        "gpt_oss": [9, None],
        "mimo_v2": [None, 7],
        "mistral": [11, 11],
        "qwen2_sliding": [None, 9, 9],
    }
    for family, windows in expected.items():
        make_checkpoint(family, tmp_path / family)
        loaded = load_model(tmp_path / family, LoadOptions(num_threads=1, model_impl="transformers"))
        assert [shape.window for shape in loaded.facts.kv_shapes] == windows


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("deepseek_v32", "(indexed|deepseek_sparse)_attention"),
        ("falcon_mamba", "linear_attention"),
        ("jamba", "linear_attention"),
        ("kimi_linear", "linear_attention"),
        ("mamba", "linear_attention"),
        ("minimax", "linear_attention"),
        ("zamba2", "hybrid, linear_attention"),
    ],
)
def test_kinds_of_layers_that_attention_cannot_serve_are_refused_unread(tmp_path, model_type, kinds):
    config = CONFIG_MAPPING[model_type]()
    config.save_pretrained(tmp_path)
    name = type(config).__name__.removesuffix("TextConfig").removesuffix("Config")
    with pytest.raises(UnsupportedModel, match=f"{name}.* has layers of kind {kinds}"):
        load_model(tmp_path, LoadOptions(num_threads=1))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (
            "falcon",
            "FalconForCausalLM has 2 layers with attention, but called the attention interface 0 times",
        ),
        ("bloom", "BloomForCausalLM has 2 layers with attention, but called the attention interface 0 times"),
        ("gptj", "GPTJForCausalLM has 2 layers with attention, but called the attention interface 0 times"),
        ("mpt", "MptForCausalLM has 2 layers with attention, but called the attention interface 0 times"),
        ("bert", "BertLMHeadModel lets tokens see later ones"),
        ("doge", "DogeForCausalLM adds a mask of its own to attention"),
        ("lfm2", "Lfm2ForCausalLM has layers of kind conv"),
        ("moshi", "MoshiForCausalLM forgets all but 9 tokens when it generates"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM has"),
        ("t5", "T5ForConditionalGeneration is an encoder-decoder"),
    ],
)
def test_models_that_would_run_wrongly_are_refused_by_name(tmp_path: Path, family: str, reason: str):
    make_checkpoint(family, tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(tmp_path, LoadOptions(num_threads=1))
