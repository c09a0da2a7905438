"""The real engine, put together from a configuration and run on a real checkpoint."""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
import random
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import triptych_cli.tiny_model
from engine_svc.admin.served_engine import LoadedCore
from engine_svc.build.engine import (
    build_core,
    build_engine,
    build_memberships,
    build_served_engine,
    layer_kinds,
)
from engine_svc.cache.attention import AlignedState, ChunkedLocal, FullAttention, KeptState, SlidingWindow
from engine_svc.cache.block_hash import BlockHasher
from engine_svc.cache.config import CacheConfig
from engine_svc.config import EngineConfig
from engine_svc.core.extras import Extra
from engine_svc.core.facts import LoadProgress
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Add, Stop
from engine_svc.membership.departure import Departure
from engine_svc.model.facts import LayerGroup
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.session.servicer import EngineCoreServicer
from tests.engine_svc.loop.frontend import Frontend
from tests.engine_svc.model.loading.quantized_weights import gptq, write_folder
from tests.engine_svc.runner.chains import Chain
from tests.triptych_kit.plugin_folder import write_feature
from triptych_cli.verbs.replay import run_replay
from triptych_kit.config import ConfigError

_PACKAGED = Path(triptych_cli.tiny_model.__file__).parent / "weights"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, drawn wide enough that its greedy streams vary."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            eos_token_id=5,
            dtype=torch.float32,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    model.save_pretrained(folder)
    return folder


class Built:
    """An engine from `config` and what it said while it was loading."""

    def __init__(self, config: EngineConfig) -> None:
        served = build_served_engine(config)
        self.inbox, self.stats_snapshot = served.inbox, served.stats_snapshot
        self.kv_event_log = served.kv_event_log
        self.progress: list[LoadProgress] = []
        self.deferred: list[object] = []
        self.engine: Engine
        self.core: LoadedCore
        self.engine, self.core = build_engine(
            config, served, progress=self.progress.append, defer=self.deferred.append
        )

    def generate(
        self, prompts: list[list[int]], max_tokens: int, extras: Mapping[int, Extra] = MappingProxyType({})
    ) -> list[list[int]]:
        """Greedy continuations of `prompts`, all at once. extras: of some of them, by index."""
        frontend = Frontend()
        for handle, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            request = Request(f"r{handle}", list(prompt), len(prompt), sampling)
            if (extra := extras.get(handle)) is not None:
                request.extras[type(extra)] = extra
            assert self.core.refusal(request) is None
            self.core.prepare(request)
            self.inbox.put(Add(request, frontend.outbox, handle))
        thread = threading.Thread(target=self.engine.run)
        thread.start()
        frontend.read_until_ended(len(prompts))
        self.inbox.put(Stop())
        thread.join(10)
        return [frontend.tokens[handle] for handle in range(len(prompts))]


def transformers_greedy(folder: Path, prompt: list[int], max_tokens: int) -> list[int]:
    # Untyped: the library's own stubs contradict each other about `generate`.
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return answer[0, len(prompt) :].tolist()


def test_ids_equal_those_of_transformers_through_chunks_preemptions_and_prefix_hits(llama):
    config = EngineConfig(
        model=str(llama),
        max_model_len=128,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        block_size=4,
        num_kv_blocks=40,
        num_threads=1,
    )
    built = Built(config)
    rng = random.Random(1)
    shared = [rng.randrange(256) for _ in range(20)]
    prompts = [shared + [rng.randrange(256) for _ in range(rng.randrange(1, 30))] for _ in range(10)]
    answers = built.generate(prompts, 24)
    assert answers == [transformers_greedy(llama, prompt, 24) for prompt in prompts]
    assert len(set(answers[0])) >= 10
    stats = built.stats_snapshot.read().scheduler
    assert stats.num_chunked_prefills > 0
    assert stats.num_preemptions > 0
    assert stats.prefix_hits > 0
    assert stats.num_used_blocks == 0


def test_a_draft_model_has_the_same_tokenizer_where_it_writes_merges_as_lines(tmp_path):
    for path in _PACKAGED.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "tokenizer.json").unlink()
    content = json.loads((_PACKAGED / "tokenizer.json").read_text())
    pairs = content["model"]["merges"]
    config = EngineConfig(
        model=str(_PACKAGED),
        speculative="draft",
        speculative_model=str(tmp_path),
        max_model_len=64,
        max_num_seqs=2,
        num_kv_blocks=16,
        num_threads=1,
    )
    content["model"]["merges"] = [" ".join(pair) for pair in pairs]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(Built(config).generate([[1, 2, 3]], 4)[0]) == 4
    content["model"]["merges"] = [" ".join(pair) for pair in reversed(pairs)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="another tokenizer than the model"):
        Built(config)


@pytest.mark.parametrize(
    "choices",
    [
        {"enable_prefix_caching": False, "num_kv_blocks": 10, "max_num_batched_tokens": 40},
        {"num_kv_blocks": 10, "max_num_batched_tokens": 40},
        {"enable_chunked_prefill": False, "num_kv_blocks": 200},
        {"scheduling_policy": "priority", "num_kv_blocks": 12, "long_prefill_token_threshold": 7},
        {"speculative": "suffix", "draft_limit": "none", "num_kv_blocks": 12},
    ],
    ids=["no prefix cache", "room for one", "no chunks", "priority", "drafts"],
)
def test_ids_do_not_depend_on_how_the_engine_is_run(llama, choices):
    built = Built(EngineConfig(model=str(llama), max_model_len=144, num_threads=1, **choices))
    rng = random.Random(2)
    shared = [rng.randrange(256) for _ in range(40)]
    prompts = [
        shared * (row % 2) + [rng.randrange(256) for _ in range(rng.randrange(1, 50))] for row in range(16)
    ]
    answers = built.generate(prompts, 32)
    assert answers == [transformers_greedy(llama, prompt, 32) for prompt in prompts]
    stats = built.stats_snapshot.read().scheduler
    assert (stats.num_preemptions > 0) == (choices["num_kv_blocks"] < 100)
    assert (stats.drafts.num_accepted_tokens > 0) == ("speculative" in choices)
    assert stats.num_used_blocks == 0


CHAINS = """
from tests.engine_svc.runner.chains import Chain, ChainRows

EXTRAS = (Chain,)

def make(config, context):
    return ChainRows(context.vocab_size)
"""


def test_requests_wait_for_what_a_feature_of_another_package_prepares(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(write_feature(tmp_path, "chains", extras=CHAINS, runner=CHAINS))
    trace = tmp_path / "trace.jsonl"
    built = Built(
        EngineConfig(model=str(llama), max_model_len=128, num_threads=1, sched_trace_path=str(trace))
    )
    prompts = [list(range(10 * row, 10 * row + 7)) for row in range(4)]
    chains = {0: Chain(3, "bad"), 1: Chain(3), 3: Chain(5)}
    answers = built.generate(prompts, 24, chains)
    assert answers[0] == []
    assert answers[2] == transformers_greedy(llama, prompts[2], 24)
    for row in (1, 3):
        assert len(answers[row]) == 24
        assert chains[row].keeps([*prompts[row], *answers[row]], 7, vocab_size=256)
    assert '"op":"unblock","id":"r1","name":"chain"' in trace.read_text()
    assert run_replay(trace) == 0


def test_ids_of_the_packaged_model_equal_those_of_transformers():
    built = Built(EngineConfig(model=str(_PACKAGED), dtype="float32", num_threads=1, kv_cache_memory=2**26))
    prompts = [list(range(10, 20)), list(range(100, 103))]
    assert built.generate(prompts, 16) == [transformers_greedy(_PACKAGED, prompt, 16) for prompt in prompts]


def test_ids_of_quantized_weights_equal_those_of_transformers_with_the_weights_in_full(llama, tmp_path):
    store = gptq(4, 16, is_symmetric=False, has_order=True)
    quantized, full = write_folder(
        llama,
        tmp_path,
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        lambda module, shape, seed: store(shape, seed) if module.endswith("_proj") else None,
    )
    choices = {"max_model_len": 128, "max_num_batched_tokens": 24, "block_size": 4, "num_kv_blocks": 40}
    rng = random.Random(3)
    shared = [rng.randrange(256) for _ in range(20)]
    prompts = [shared + [rng.randrange(256) for _ in range(rng.randrange(1, 30))] for _ in range(6)]
    ours, plain = (
        Built(EngineConfig(model=str(folder), num_threads=1, activations="exact", **choices))
        for folder in (quantized, full)
    )
    answers = ours.generate(prompts, 24)
    assert answers == plain.generate(prompts, 24)
    assert answers == [transformers_greedy(full, prompt, 24) for prompt in prompts]
    assert len(set(answers[0])) >= 10
    # Requests of one are not continued by the other.
    assert ours.core.facts.fingerprint != plain.core.facts.fingerprint


def test_facts_tell_what_was_built(llama):
    config = EngineConfig(model=str(llama), num_kv_blocks=100, num_threads=1, served_model_name="small")
    built = Built(config)
    facts = built.core.facts
    assert (facts.model_name, facts.max_model_len, facts.num_kv_blocks) == ("small", 256, 100)
    assert (facts.vocab_size, facts.eos_token_ids, facts.block_size) == (256, (5,), 16)
    assert {progress.phase for progress in built.progress} == {"weights", "memory", "warm-up"}
    assert Built(config).core.facts.fingerprint == facts.fingerprint
    others = replace(config, logprobs_mode="raw_logits")
    assert Built(others).core.facts.fingerprint.digest != facts.fingerprint.digest


@pytest.mark.parametrize("is_logged", [True, False])
def test_each_step_has_a_line_if_steps_are_logged_and_else_none(llama, caplog, is_logged):
    config = EngineConfig(
        model=str(llama), num_kv_blocks=100, num_threads=1, max_num_batched_tokens=16, log_steps=is_logged
    )
    built = Built(config)
    with caplog.at_level(logging.INFO):
        built.generate([list(range(20, 60)), list(range(9))], 12)
    lines = [vars(record) for record in caplog.records if record.message == "step"]
    stats = built.stats_snapshot.read()
    assert sum(line["num_sampled"] for line in lines) == 24 * is_logged
    # The last token of a request is not computed.
    assert sum(line["num_prefill_tokens"] + line["num_decodes"] for line in lines) == (71 * is_logged)
    assert len(lines) == stats.step_number * is_logged


def test_prefix_cache_contents_are_published_where_enabled(llama):
    config = EngineConfig(model=str(llama), num_kv_blocks=40, block_size=4, num_threads=1, max_model_len=64)
    prompt = list(range(20, 40))
    silent = Built(config)
    silent.generate([prompt], 5)
    assert silent.kv_event_log is None
    publishing = Built(replace(config, enable_kv_events=True))
    answer = publishing.generate([prompt], 5)[0]
    log = publishing.kv_event_log
    assert log is not None
    _, blocks = log.open_with_snapshot(lambda: None)
    # The last token has no KV yet, so all but it is in full blocks.
    assert [token for block in blocks for token in block.token_ids] == (prompt + answer)[:24]
    hasher = BlockHasher(4, bytes.fromhex(publishing.core.facts.fingerprint.digest))
    request = Request("same", prompt + answer, 20, SamplingParams(max_tokens=5))
    hasher.extend(request)
    assert [block.block_hashes[0] for block in blocks] == request.block_hashes


def test_a_longer_context_than_the_models_is_refused(llama):
    with pytest.raises(ConfigError, match="1000"):
        Built(EngineConfig(model=str(llama), max_model_len=1000, num_threads=1))


def test_the_context_is_fitted_to_the_memory_only_where_it_is_unset(llama):
    assert (
        Built(EngineConfig(model=str(llama), num_kv_blocks=10, num_threads=1)).core.facts.max_model_len == 160
    )
    with pytest.raises(ValueError, match="max_model_len"):
        Built(EngineConfig(model=str(llama), num_kv_blocks=10, max_model_len=200, num_threads=1))


@pytest.mark.parametrize("num_stages", [1, 2], ids=["in a thread", "in ranks"])
def test_of_an_engine_that_cannot_be_built_nothing_is_left_running(llama, num_stages, tmp_path):
    children, threads = psutil.Process().children(), threading.enumerate()
    config = EngineConfig(
        model=str(llama),
        num_kv_blocks=20,
        num_threads=1,
        pipeline_parallel_size=num_stages,
        sched_trace_path=str(tmp_path / "trace.jsonl"),
    )
    with (tmp_path / "trace.jsonl").open("wb") as used:
        fcntl.flock(used, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another engine writes to"):
            Built(config)
    assert psutil.Process().children() == children
    assert {thread.name for thread in threading.enumerate() if thread not in threads} <= {"tqdm_monitor"}


def test_an_engine_knows_what_its_operator_says_of_it(llama):
    config = EngineConfig(model=str(llama), label=("zone=a", "rack=7"))
    assert build_served_engine(config).identity.labels == (("zone", "a"), ("rack", "7"))


SCHEDULER_CONFIGS = """
SEEN = []

def make(config, context):
    SEEN.append(context.scheduler_config)
"""


def test_common_blocks_are_counted_where_kernels_read_them(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(write_feature(tmp_path, "configs", scheduler=SCHEDULER_CONFIGS))
    # The reference ops compute half precision.
    for dtype in ("float32", "float16"):
        Built(EngineConfig(model=str(llama), dtype=dtype, num_kv_blocks=20, num_threads=1))
    seen = importlib.import_module("feature_configs.scheduler").SEEN
    assert [config.enable_common_prefix for config in seen] == [True, False]


CALLS = """
from engine_svc.admin.served_engine import Role, UtilityCall
from engine_svc.convert.feature import WireFeature

class Flushing(WireFeature):
    utilities = [UtilityCall("flush_pins", Role.ADMIN, lambda context, call: None)]

def make(config):
    return Flushing()
"""


def test_an_engine_serves_the_calls_of_a_feature_of_another_package(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = EngineConfig(model=str(llama))
    assert "flush_pins" not in build_served_engine(config).utilities
    monkeypatch.syspath_prepend(write_feature(tmp_path, "flushing", wire=CALLS))
    assert "flush_pins" in build_served_engine(config).utilities


def test_there_is_no_membership_without_a_coordinator(llama):
    config = EngineConfig(model=str(llama))
    engine = build_served_engine(config)
    servicer = EngineCoreServicer(engine)
    departure = Departure(engine, until_dry=servicer.until_dry, stop_process=lambda: None)
    assert build_memberships(config, engine, departure, bound="127.0.0.1:5") == []


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["whole", "expert parallel"])
def test_a_dense_model_steps_alone_whatever_its_engine_is_one_of(llama, expert_parallel):
    config = EngineConfig(
        model=str(llama), data_parallel_size=2, expert_parallel=expert_parallel, num_threads=1
    )
    built = Built(config)
    assert built.core.lockstep is None
    assert not build_served_engine(config).shares_experts


def test_layers_with_states_are_the_last_group_and_keep_them_by_whole_blocks():
    config = EngineConfig(model="folder", block_size=24, state_interval=100)
    full, near, chunked = LayerGroup(None, (0,)), LayerGroup(8, (1,)), LayerGroup(None, (2,), 48)
    kinds = (FullAttention(24), SlidingWindow(24, 8), ChunkedLocal(24, 48))
    assert layer_kinds(config, (full, near, chunked), 0) == kinds
    assert layer_kinds(config, (full,), 5) == (FullAttention(24), KeptState(24, 120))


@pytest.mark.parametrize(
    ("num_drafts", "num_slots", "why"),
    [
        (2, 9, "drafts are not served for a model whose layers have states"),
        (0, 4, "memory for states holds 4, max_num_seqs of 4 needs 5"),
    ],
)
def test_what_does_not_go_with_states_is_refused(num_drafts: int, num_slots: int, why: str):
    scheduler = SchedulerConfig(max_model_len=64, max_num_seqs=4, num_speculative_tokens=num_drafts)
    cache = CacheConfig(10, (FullAttention(4), KeptState(4, 8)), num_state_slots=num_slots)
    with pytest.raises(ValueError, match=why):
        build_core(scheduler, cache)


def test_states_that_are_written_at_ends_of_steps_need_chunks():
    scheduler = SchedulerConfig(max_model_len=64, max_num_batched_tokens=64, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match="prompts must be computed in chunks"):
        build_core(scheduler, CacheConfig(40, (AlignedState(4),)))
