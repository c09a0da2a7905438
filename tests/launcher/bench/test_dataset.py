"""What a load asks, by data set and seed."""

from __future__ import annotations

import pytest

from launcher.bench.config import BenchServeConfig
from launcher.bench.dataset import DatasetError, check_lengths, draw_conversations, draw_warmup

VOCAB_SIZE = 97


def draw(**options):
    return draw_conversations(BenchServeConfig(**options), VOCAB_SIZE, left_out=[0, 96])


def test_the_seed_decides_ids_and_lengths() -> None:
    same = {"num_requests": 5, "range_ratio": 0.5}
    assert draw(seed=1, **same) == draw(seed=1, **same)
    assert draw(seed=1, **same) != draw(seed=2, **same)


@pytest.mark.parametrize("dataset", ["random", "shared-prefix", "multi-turn"])
def test_ids_are_of_the_vocabulary_and_not_left_out(dataset: str) -> None:
    ids = {each for turns in draw(dataset=dataset) for turn in turns for each in turn.token_ids}
    assert ids == set(range(1, 96))


def test_lengths_vary_by_the_ratio_and_reach_its_bounds() -> None:
    turns = [turns[0] for turns in draw(num_requests=2000, input_len=20, output_len=10, range_ratio=0.2)]
    assert {len(turn.token_ids) for turn in turns} == set(range(16, 25))
    assert {turn.num_output_tokens for turn in turns} == set(range(8, 13))


def test_without_a_ratio_lengths_are_exact() -> None:
    assert {len(turns[0].token_ids) for turns in draw(input_len=33)} == {33}


def test_prefixes_are_shared_in_turns_and_suffixes_are_not() -> None:
    prompts = [
        tuple(turns[0].token_ids)
        for turns in draw(
            dataset="shared-prefix", num_requests=9, num_prefixes=3, prefix_len=40, suffix_len=8
        )
    ]
    prefixes = [prompt[:40] for prompt in prompts]
    assert prefixes[:3] == prefixes[3:6] == prefixes[6:]
    assert len(set(prefixes)) == 3
    assert len({prompt[40:] for prompt in prompts}) == 9
    assert {len(prompt) for prompt in prompts} == {48}


def test_conversations_have_so_many_turns_and_the_last_what_is_left() -> None:
    conversations = draw(dataset="multi-turn", num_requests=11, turns=4, turn_len=5)
    assert [len(turns) for turns in conversations] == [4, 4, 3]
    assert {len(turn.token_ids) for turns in conversations for turn in turns} == {5}


def test_warm_up_prompts_are_like_the_first_and_not_among_them() -> None:
    config = BenchServeConfig(input_len=30, warmup=2, num_requests=50)
    warmup = draw_warmup(config, VOCAB_SIZE)
    prompts = [list(turns[0].token_ids) for turns in draw_conversations(config, VOCAB_SIZE)]
    assert [len(turn.token_ids) for turn in warmup] == [30, 30]
    assert all(list(turn.token_ids) not in prompts for turn in warmup)


def test_what_the_model_cannot_hold_is_refused_with_both_numbers() -> None:
    conversations = draw(dataset="multi-turn", num_requests=4, turns=4, turn_len=50, output_len=50)
    check_lengths(conversations, 400)
    with pytest.raises(DatasetError, match="would have 400 tokens, the model takes 399"):
        check_lengths(conversations, 399)


def test_a_vocabulary_without_ids_is_refused() -> None:
    with pytest.raises(DatasetError, match="leaves none"):
        draw_conversations(BenchServeConfig(), 1, left_out=[0])
