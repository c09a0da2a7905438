"""Engines that share a model's experts compute what one engine with all of them does."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_svc.core.errors import PeersLost
from engine_svc.core.step import StepPlan
from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.expert_exchange import GroupExchange
from engine_svc.model.loading.loader import LoadOptions, has_experts, load_model
from engine_svc.model.native.exchange import ExpertShare
from tests.engine_svc.model.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.engine_svc.ranks.shared_rig import Sharing, SharingEngine, in_threads, logits_of, outcomes
from triptych_kernels import Experts

LOAD_OPTIONS = LoadOptions(num_threads=1, device="cpu")
NUM_EXPERTS = 4

Share = Callable[..., Sharing]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for family in ("mixtral", "qwen3_moe", "llama"):
        made[family] = tmp_path_factory.mktemp(family)
        make_checkpoint(family, made[family])
    return made


@pytest.fixture
def share() -> Iterator[Share]:
    made: list[Sharing] = []

    def start(*arguments: object, **options: object) -> Sharing:
        made.append(Sharing(*arguments, **options))
        return made[-1]

    yield start
    for sharing in made:
        sharing.close()


def tokens_of(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


def logits(sharing: Sharing, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return in_threads(
        [partial(logits_of, engine, row) for engine, row in zip(sharing.members, rows, strict=True)]
    )


def whole(share: Share, folder: Path, rows: list[torch.Tensor], **options: object) -> list[torch.Tensor]:
    """The logits by an engine that holds all experts."""
    alone = share(folder, 1, **options)
    alone.form()
    return [logits(alone, [row])[0] for row in rows]


def expert_bytes(folder: Path) -> int:
    weights = load_file(folder / "model.safetensors")
    return sum(tensor.nbytes for name, tensor in weights.items() if ".experts." in name)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_logits_are_those_of_all_experts_in_one_place(share, folders, family, size):
    rows = [tokens_of(3 + 4 * rank, seed=rank) for rank in range(size)]
    rows[1] = tokens_of(0, seed=0)
    sharing = share(folders[family], size)
    sharing.form()
    found = logits(sharing, rows)
    assert found[1].numel() == 0
    for ours, expected in zip(found, whole(share, folders[family], rows), strict=True):
        assert ours.shape == expected.shape
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_have_the_same_bits_whatever_other_ranks_compute(share, folders, dtype):
    sharing = share(folders["mixtral"], 3, dtype=dtype)
    if not sharing.engines[0].loaded.ops.is_batch_invariant:
        pytest.skip("this machine has no native kernels")
    sharing.form()
    own, nothing = tokens_of(21, seed=1), tokens_of(0, seed=1)
    for rank in range(3):
        alone = [own if other == rank else nothing for other in range(3)]
        in_company = [own if other == rank else tokens_of(9 + other, seed=other) for other in range(3)]
        first, second = logits(sharing, alone)[rank], logits(sharing, in_company)[rank]
        assert first.isfinite().all()
        assert torch.equal(first, second)


def test_streams_of_steps_with_idle_ranks_and_chunks_are_those_of_one_engine(share, folders):
    prompts = {f"r{index}": tokens_of(length, index).tolist() for index, length in enumerate([5, 1, 17, 30])}
    alone, shared = share(folders["mixtral"], 1), share(folders["mixtral"], 2)
    for sharing in (alone, shared):
        sharing.form()
        for index, (name, prompt) in enumerate(prompts.items()):
            sharing.members[index % len(sharing.members)].driver.add(name, prompt)
    for sharing in (alone, shared):
        run_in_random_steps(sharing, num_tokens=24)
    streams = [
        {name: request.output_token_ids for engine in sharing.members for name, request in
         engine.driver.requests.items()}
        for sharing in (alone, shared)
    ]  # fmt: skip
    assert streams[0] == streams[1]
    assert len({token for stream in streams[0].values() for token in stream}) >= 20


def run_in_random_steps(sharing: Sharing, *, num_tokens: int) -> None:
    """Random chunks of random requests, until all have so many tokens; at times a rank has none to run."""
    choose = random.Random(3)
    while True:
        open_requests = [
            [each for each in engine.driver.requests.values() if len(each.output_token_ids) < num_tokens]
            for engine in sharing.members
        ]
        if not any(open_requests):
            return
        sharing.step(
            [
                {
                    each.request_id: choose.randint(1, each.num_pending_tokens)
                    for each in requests
                    if choose.random() < 0.7
                }
                for requests in open_requests
            ]
        )


def test_each_rank_holds_its_share_of_the_expert_bytes(share, folders):
    total = whole_bytes(share, folders["mixtral"])
    assert total >= expert_bytes(folders["mixtral"])
    for size in (2, 3, 4, 6):
        held = [engine.experts.num_bytes for engine in share(folders["mixtral"], size).engines]
        assert sum(held) == total
        assert max(held) == total * -(-NUM_EXPERTS // size) // NUM_EXPERTS


def whole_bytes(share: Share, folder: Path) -> int:
    return share(folder, 1).engines[0].experts.num_bytes


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_engines_go_on_in_groups_of_other_sizes_with_what_they_hold(share, folders, family, caplog):
    sharing = share(folders[family], 2)
    one, two = sharing.engines
    third = SharingEngine(folders[family], 2, 3)
    sharing.engines.append(third)
    rows = [tokens_of(6, 1), tokens_of(9, 2), tokens_of(4, 3)]
    expected = whole(share, folders[family], rows)
    total = whole_bytes(share, folders[family])
    for members in ([one, two], [one, two, third], [third, one], [two], [one, two], [two, third, one]):
        sharing.form(members)
        for found, wanted in zip(logits(sharing, rows[: len(members)]), expected, strict=False):
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0.0)
        assert sum(engine.experts.num_bytes for engine in members) == total
        sharing.leave()


def test_only_experts_that_are_not_held_are_read(share, folders, caplog):
    caplog.set_level("INFO", logger="engine_svc.data_parallel.expert_shards")
    (engine,) = share(folders["mixtral"], 1).engines
    total = engine.experts.num_bytes
    read = []
    for rank, size in ((0, 2), (0, 4), (0, 2), (1, 2), (0, 1)):
        engine.experts.prepare(rank, size)
        read.append(caplog.records[-1].num_bytes_read / total)
        engine.experts.adopt()
    assert read == [0, 0, 0.25, 0.5, 0.5]


class Crowding:
    """Experts beside which there is no memory for others."""

    def __init__(self, experts: Experts) -> None:
        self.num_bytes, self.expert_range = experts.num_bytes, experts.expert_range

    def take(self, first: int, end: int) -> Experts:
        raise torch.OutOfMemoryError("no room")


def test_a_share_for_which_there_is_no_room_takes_the_place_of_one_that_nothing_runs_with(share, folders):
    sharing = share(folders["mixtral"], 2)
    engine, row = sharing.engines[0], tokens_of(6, 1)
    held, total = engine.experts.num_bytes, whole_bytes(share, folders["mixtral"])
    for mixture in engine.model.mixtures:
        mixture.mixture.experts = Crowding(mixture.mixture.experts)
    with pytest.raises(ValueError, match="too little memory for the experts of rank 0 of 1"):
        engine.experts.prepare(0, 1)
    assert engine.experts.num_bytes == held
    engine.experts.prepare(0, 1, may_release=True)
    assert engine.experts.num_bytes == 0
    # Given up as well, and then its first share is wanted again.
    engine.experts.forget()
    engine.experts.prepare(0, 2)
    engine.experts.adopt()
    assert (engine.experts.exchange.holds, engine.experts.num_bytes) == ((0, 2), held)
    sharing.form([engine])
    assert engine.experts.num_bytes == total
    torch.testing.assert_close(
        logits(sharing, [row])[0], whole(share, folders["mixtral"], [row])[0], atol=1e-4, rtol=0.0
    )


def test_what_is_forgotten_is_not_adopted(share, folders):
    engine = share(folders["mixtral"], 2).engines[0]
    held = engine.experts.num_bytes
    engine.experts.prepare(0, 4)
    engine.experts.forget()
    engine.experts.adopt()
    assert (engine.experts.exchange.holds, engine.experts.num_bytes) == ((0, 2), held)


def test_experts_of_a_folder_that_has_changed_are_not_mixed_with_those_held(share, folders, tmp_path):
    folder = Path(shutil.copytree(folders["mixtral"], tmp_path / "model"))
    engine = share(folder, 2).engines[0]
    held = engine.experts.num_bytes
    change(folder)
    with pytest.raises(CheckpointError, match="other weights than when it was loaded"):
        engine.experts.prepare(0, 1)
    engine.experts.adopt()
    assert engine.experts.num_bytes == held
    with pytest.raises(ValueError, match="rank is 3, must be at least 0 and below 2"):
        engine.experts.prepare(3, 2)


def change(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if ".w2." in name:
            weights[name] *= -0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_step_in_no_group_or_with_the_experts_of_another_place_is_refused(share, folders):
    sharing = share(folders["mixtral"], 2)
    row = tokens_of(4, 1)
    with pytest.raises(PeersLost, match="in no group"):
        logits_of(sharing.engines[0], row)
    sharing.form()
    sharing.members[0].experts.prepare(0, 4)
    sharing.members[0].experts.adopt()
    with pytest.raises(RuntimeError, match="rank 0 of 2 holds the experts of 0 of 4"):
        logits_of(sharing.members[0], row)


def test_a_step_whose_other_ranks_leave_is_lost_and_runs_again_in_the_next_group(share, folders):
    sharing = share(folders["mixtral"], 3)
    sharing.form()
    first, second, third = sharing.engines
    request = first.driver.add("a", tokens_of(11, 1).tolist())
    sharing.step([{"a": 11}, {}, {}])
    lost = outcomes(
        [
            lambda: first.driver.step({"a": 1}),
            lambda: second.runner.execute(StepPlan(1)),
            third.group.close,
        ]
    )
    assert [type(each) for each in lost] == [PeersLost, PeersLost, type(None)]
    for engine in (first, second):
        engine.group.close()
    sharing.form([first, second])
    first.driver.num_steps = 2
    before = list(request.token_ids)
    for _ in range(6):
        sharing.step([{"a": 1}, {}])
    alone = share(folders["mixtral"], 1)
    alone.form()
    expected = alone.engines[0].driver.add("a", before[:11])
    alone.step([{"a": 11}])
    for _ in range(6):
        alone.step([{"a": 1}])
    assert request.token_ids == expected.token_ids


def test_a_rank_that_only_releases_takes_part_and_frees_its_rows(share, folders):
    sharing = share(folders["mixtral"], 2)
    sharing.form()
    one, two = (engine.driver for engine in sharing.engines)
    one.add("a", tokens_of(7, 1).tolist())
    two.add("b", tokens_of(7, 2).tolist())
    sharing.step([{"a": 7}, {"b": 7}])
    results = in_threads(
        [
            lambda: one.step({"a": 1}),
            lambda: sharing.engines[1].runner.execute(StepPlan(1, released=["b"])).result(),
        ]
    )
    assert [len(result.sampled) for result in results] == [1, 0]
    assert "b" not in sharing.engines[1].runner.batch.row_of


def test_ranks_that_are_not_at_the_same_step_lose_each_other(share, folders):
    sharing = share(folders["mixtral"], 2)
    sharing.form()
    exchange: GroupExchange = sharing.engines[0].experts.exchange
    exchange.enter(sharing.engines[0].group.tensors)
    in_threads([engine.model.take_part for engine in sharing.engines])
    exchange.enter(sharing.engines[0].group.tensors)
    lost = outcomes([engine.model.take_part for engine in sharing.engines])
    assert all(isinstance(each, PeersLost) for each in lost)


def test_weights_that_were_given_up_come_back_as_the_share_of_the_group_that_was_formed_meanwhile(
    share, folders, tmp_path
):
    folder = Path(shutil.copytree(folders["mixtral"], tmp_path / "model"))
    sharing = share(folder, 2)
    one, two = sharing.engines
    total = one.experts.num_bytes + two.experts.num_bytes
    prompt = tokens_of(9, 4).tolist()
    one.loaded = None
    one.runner.sleep(2)
    one.experts.prepare(0, 1)
    one.experts.adopt()
    one.runner.wake()
    assert one.experts.num_bytes == total
    change(folder)
    one.experts.prepare(0, 1)
    one.runner.reload_weights()
    sharing.form([one])
    alone = share(folder, 1)
    alone.form()
    streams = []
    for each in (sharing, alone):
        request = each.members[0].driver.add("a", prompt)
        each.step([{"a": 9}])
        for _ in range(8):
            each.step([{"a": 1}])
        streams.append(request.output_token_ids)
    assert streams[0] == streams[1]


def test_a_warm_up_does_not_wait_for_other_ranks(share, folders):
    engine = share(folders["mixtral"], 2).engines[0]
    engine.runner.warm_up(16)
    with pytest.raises(PeersLost):
        engine.runner.execute(StepPlan(0))


def test_models_whose_experts_cannot_be_divided_are_refused_by_name(folders):
    alone = ExpertShare(0, 2, GroupExchange(0, 2))
    with pytest.raises(UnsupportedModel, match="llama without experts has none to divide over engines"):
        load_model(folders["llama"], LOAD_OPTIONS, share=alone)
    options = LoadOptions(num_threads=1, model_impl="transformers")
    with pytest.raises(UnsupportedModel, match="divided over engines need a native model, and model_impl"):
        load_model(folders["mixtral"], options, share=alone)
    assert [has_experts(folders[family]) for family in ("mixtral", "qwen3_moe", "llama")] == [
        True,
        True,
        False,
    ]
