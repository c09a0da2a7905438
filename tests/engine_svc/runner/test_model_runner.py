"""Plans run on real tiny models: token by token what transformers generates, however the steps are cut."""

from __future__ import annotations

import random

import pytest
import torch

from engine_svc.core.step import StepPlan
from tests.engine_svc.runner.fakes import LogitsOfAllRows

NUM_TOKENS = 24
FAMILIES = [
    "llama", "qwen2", "gpt2", "mistral", "gemma3", "gemma2", "gpt_oss", "mixtral", "qwen3_moe", "phi3", "opt",
    "deepseek_v3",
]  # fmt: skip

NATIVE_FAMILIES = [
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "phi3", "qwen3_moe", "gemma3", "granite", "olmo2",
    "olmo3", "gpt_oss",
]  # fmt: skip


def prompt_of(length: int, *, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(3, 160) for _ in range(length)]


def generated(model, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    """What transformers continues the prompt with, greedily and past any end."""
    model.generation_config.eos_token_id = None
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


def assert_same_stream(model, prompt: list[int], tokens: list[int]) -> None:
    """Equal to transformers' stream up to a place where its two best logits are as good as equal."""
    expected = generated(model, prompt, len(tokens))
    if tokens == expected:
        return
    place = next(index for index, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1])
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + expected[:place]])).logits[0, -1]
    best = logits.topk(2).values
    assert best[0] - best[1] < 1e-4, f"differs at {place}: {tokens[place]} for {expected[place]}"


def run_in_random_steps(driver, *, num_tokens: int, seed: int, preempt: bool) -> None:
    """Random chunks, random company, now and then a preemption, until all have num_tokens of output."""
    choose = random.Random(seed)
    while True:
        open_ids = [
            request.request_id
            for request in driver.requests.values()
            if len(request.output_token_ids) < num_tokens
        ]
        if not open_ids:
            return
        if preempt and choose.random() < 0.1:
            running = [name for name in open_ids if driver.requests[name].is_admitted]
            if running:
                driver.preempt(choose.choice(running))
        grants = {}
        for name in open_ids:
            if choose.random() < 0.8:
                pending = driver.requests[name].num_pending_tokens
                grants[name] = pending if choose.random() < 0.4 else choose.randint(1, pending)
        if grants:
            driver.step(grants)


@pytest.mark.parametrize(
    ("family", "model_impl"),
    [(family, "transformers") for family in FAMILIES] + [(family, "native") for family in NATIVE_FAMILIES],
)
def test_mixed_chunked_and_resumed_steps_produce_what_transformers_generates(tiny_model, family, model_impl):
    model = tiny_model(family, model_impl)
    driver = model.driver()
    prompts = {f"r{i}": prompt_of(length, seed=i) for i, length in enumerate([1, 3, 17, 40, 70])}
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    run_in_random_steps(driver, num_tokens=NUM_TOKENS, seed=5, preempt=True)
    distinct = set()
    for name, prompt in prompts.items():
        tokens = driver.requests[name].output_token_ids
        distinct.update(tokens)
        assert_same_stream(model.theirs, prompt, tokens)
    assert len(distinct) >= 20


def test_streams_are_varied_enough_to_show_a_mistake(tiny_model):
    for family in ("llama", "qwen2", "gpt2"):
        assert len(set(generated(tiny_model(family).theirs, prompt_of(12, seed=2), 64))) >= 20


def test_a_prefix_whose_blocks_another_request_filled_is_not_computed_again(tiny_model):
    model = tiny_model("llama")
    driver = model.driver()
    shared = prompt_of(16, seed=1)
    first = driver.add("first", shared + prompt_of(5, seed=2))
    driver.step({"first": 21})
    second = driver.add("second", shared + prompt_of(9, seed=3))
    second.block_ids, second.num_computed_tokens = [first.block_ids[0][:4]], 16
    driver.step({"first": 1, "second": 9})
    for _ in range(10):
        driver.step({"first": 1, "second": 1})
    for request in (first, second):
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert_same_stream(model.theirs, prompt, request.output_token_ids)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_rows_that_read_common_blocks_together_produce_the_same_tokens(tiny_model, model_impl):
    model = tiny_model("llama", model_impl)
    shared, num_blocks = prompt_of(92, seed=1), 92 // 4

    def sharing_driver():
        driver = model.driver()
        driver.add("0", shared + prompt_of(3, seed=0))
        driver.step({"0": 95})
        for index in range(1, 5):
            request = driver.add(str(index), shared + prompt_of(3 + index, seed=index))
            request.block_ids = [[*driver.requests["0"].block_ids[0][:num_blocks]]]
            request.num_computed_tokens = 92
        return driver

    alone, together = sharing_driver(), sharing_driver()
    first = {"0": 1, **{str(index): 3 + index for index in range(1, 5)}}
    for grants in [first, *[dict.fromkeys("01234", 1)] * 12]:
        alone.step(grants)
        together.step(grants, [num_blocks])
    for name, request in together.requests.items():
        assert request.token_ids == alone.requests[name].token_ids
    if model_impl == "native":
        # The kernel compares the tables of the rows that it takes together.
        with pytest.raises(ValueError, match="rows do not begin with the same blocks"):
            together.step(dict.fromkeys("01234", 1), [num_blocks + 1])


def test_a_chunk_that_does_not_reach_the_last_token_samples_nothing(tiny_model):
    driver = tiny_model("llama").driver()
    driver.add("a", prompt_of(10, seed=0))
    assert driver.step({"a": 6}).sampled == [[]]
    assert len(driver.step({"a": 4}).sampled[0]) == 1


def test_a_plan_without_rows_yields_nothing(tiny_model):
    runner = tiny_model("llama").runner()
    result = runner.execute(StepPlan(7)).result()
    assert (result.step_number, result.sampled) == (7, [])


def test_rows_are_used_again(tiny_model):
    model = tiny_model("llama")
    driver = model.driver()
    for round_number in range(5):
        names = [f"{round_number}-{i}" for i in range(8)]
        for i, name in enumerate(names):
            driver.add(name, prompt_of(3 + i, seed=10 * round_number + i))
        driver.step({name: driver.requests[name].num_pending_tokens for name in names})
        driver.step(dict.fromkeys(names, 1))
        for name in names:
            request = driver.finish(name)
            assert_same_stream(
                model.theirs, request.token_ids[: request.num_prompt_tokens], request.output_token_ids
            )


def test_drafts_are_an_error_where_nothing_proposes_them(tiny_model):
    runner = tiny_model("llama").runner()
    plan = StepPlan(3, request_ids=["a"], draft_token_ids=[[5]])
    with pytest.raises(ValueError, match="step 3 has drafts"):
        runner.execute(plan)


def test_a_token_sampled_in_company_is_the_one_sampled_alone(tiny_model):
    model = tiny_model("qwen2")
    sampling_options = {"temperature": 0.9, "top_k": 40, "top_p": 0.95}
    prompts = {f"r{i}": prompt_of(4 + 9 * i, seed=i) for i in range(5)}
    together = model.driver()
    for i, (name, prompt) in enumerate(prompts.items()):
        together.add(name, prompt, seed=100 + i, **sampling_options)
    run_in_random_steps(together, num_tokens=20, seed=2, preempt=True)
    for i, (name, prompt) in enumerate(prompts.items()):
        alone = model.driver()
        alone.add(name, prompt, seed=100 + i, **sampling_options)
        run_in_random_steps(alone, num_tokens=20, seed=9, preempt=False)
        assert alone.requests[name].output_token_ids[:20] == together.requests[name].output_token_ids[:20]


SAMPLING_OPTIONS = [
    {},
    {"temperature": 0.9, "top_k": 40},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {},
    {"logprobs": 2},
    {"min_tokens": 5, "stop_token_ids": frozenset({11})},
    {"bad_words": ((5,), (9, 8)), "logit_bias": ((7, 3.0),)},
    {"allowed_token_ids": frozenset(range(40, 90))},
]


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_rows_whose_logits_are_read_stand_among_greedy_ones(tiny_model, family):
    model = tiny_model(family, model_impl="native")
    prompts = {f"r{i}": prompt_of(4 + 5 * i, seed=i) for i in range(len(SAMPLING_OPTIONS))}
    together, token_logprobs = model.driver(), {}
    for i, (name, prompt) in enumerate(prompts.items()):
        together.add(name, prompt, seed=100 + i, **SAMPLING_OPTIONS[i])
    for _ in range(12):
        pending = {name: request.num_pending_tokens for name, request in together.requests.items()}
        token_logprobs = together.step(pending).logprobs
    assert list(token_logprobs) == [4]
    for i, (name, prompt) in enumerate(prompts.items()):
        # Features that read all logits have them written, and the largest looked for there.
        alone = model.driver(features=(LogitsOfAllRows(lambda logits, rows: None),))
        alone.add(name, prompt, seed=100 + i, **SAMPLING_OPTIONS[i])
        for _ in range(12):
            last = alone.step({name: alone.requests[name].num_pending_tokens})
        assert alone.requests[name].output_token_ids == together.requests[name].output_token_ids
        assert last.logprobs.get(0) == token_logprobs.get(i)


def test_a_greedy_row_with_nan_logits_among_others_is_reported(tiny_model):
    model = tiny_model("llama", model_impl="native")
    driver = model.driver()
    requests = [driver.add(f"r{i}", prompt_of(5 + i, seed=i), temperature=0.5 * (i % 2)) for i in range(4)]
    embedding = model.ours.model.embedding.weight
    token = requests[2].token_ids[-1]
    others = [
        token_id for request in requests if request is not requests[2] for token_id in request.token_ids
    ]
    assert token not in others
    kept = embedding[token].clone()
    embedding[token] = float("nan")
    result = driver.step({request.request_id: request.num_pending_tokens for request in requests})
    embedding[token] = kept
    assert result.non_finite == [2]
    assert [len(tokens) for tokens in result.sampled] == [1, 1, 0, 1]


def test_a_row_with_nan_logits_is_reported_and_leaves_the_others_alone(tiny_model):
    model = tiny_model("llama")
    calls = []

    def spoil(logits, rows):
        calls.append(rows)
        if len(calls) == 3:
            logits[1, 7] = float("nan")

    driver = model.driver(features=(LogitsOfAllRows(spoil),))
    requests = [driver.add(f"r{i}", prompt_of(5 + i, seed=i), temperature=0.5 * i) for i in range(3)]
    driver.step({request.request_id: request.num_pending_tokens for request in requests})
    driver.step({request.request_id: 1 for request in requests})
    result = driver.step({request.request_id: 1 for request in requests})
    assert result.non_finite == [1]
    assert [len(tokens) for tokens in result.sampled] == [1, 0, 1]


def test_a_row_whose_rules_leave_no_token_is_distinguished_from_one_with_nan_logits(tiny_model):
    driver = tiny_model("llama", model_impl="native").driver()
    rules = [{}, {"allowed_token_ids": frozenset({7}), "bad_words": ((7,),)}, {"temperature": 1.0}]
    requests = [driver.add(f"r{i}", prompt_of(5 + i, seed=i), **rule) for i, rule in enumerate(rules)]
    result = driver.step({request.request_id: request.num_pending_tokens for request in requests})
    assert (result.barred, result.non_finite) == ([1], [])
    assert [len(tokens) for tokens in result.sampled] == [1, 0, 1]


def test_nan_left_in_a_block_does_not_reach_its_next_owner(tiny_model):
    model = tiny_model("gpt2")
    driver = model.driver()
    spoiled = driver.add("spoiled", prompt_of(14, seed=1))
    embedding = model.ours.model.module.transformer.wte.weight
    token = spoiled.token_ids[2]
    kept = embedding[token].clone()
    embedding[token] = float("nan")
    assert driver.step({"spoiled": 14}).non_finite == [0]
    embedding[token] = kept
    blocks = list(spoiled.block_ids[0])
    driver.finish("spoiled")
    driver.free_blocks[:0] = blocks
    prompt = prompt_of(6, seed=2)
    clean = driver.add("clean", prompt)
    for _ in range(10):
        driver.step({"clean": clean.num_pending_tokens})
    assert clean.block_ids[0][: len(blocks)] == blocks
    assert_same_stream(model.theirs, prompt, clean.output_token_ids)


def test_ends_are_masked_until_min_tokens(tiny_model):
    model = tiny_model("llama")
    prompt = prompt_of(12, seed=0)
    free = generated(model.theirs, prompt, 12)
    driver = model.driver()
    request = driver.add(
        "a", prompt, min_tokens=6, eos_token_id=free[2], stop_token_ids=frozenset({free[4], 10**9})
    )
    for _ in range(12):
        driver.step({"a": request.num_pending_tokens})
    tokens = request.output_token_ids
    first_end = min(free.index(free[2]), free.index(free[4]))
    assert tokens[:first_end] == free[:first_end]
    assert not {free[2], free[4]} & set(tokens[:6])
