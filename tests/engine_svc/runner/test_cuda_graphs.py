"""Decode steps of recorded sizes: what is replayed is what would have been run. A stand-in records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from engine_svc.model.context import ForwardContext
from engine_svc.runner.cuda_graphs import DecodeGraphs, decode_sizes
from engine_svc.runner.input_batch import InputBatch
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from tests.engine_svc.runner.fakes import apply
from tests.engine_svc.runner.test_input_batch import admitted, plan
from triptych_kernels import StateBatch

NUM_ROWS = 6


class CountingRecorder:
    """Runs the work once, as recording does, then as often as it is replayed."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        work()

        def replay() -> None:
            self.num_replayed += 1
            work()

        return replay


@pytest.fixture
def case(tiny_model):
    """A model with two rows in decode, and graphs for sizes 1 and 4."""
    return make_case(tiny_model("llama", "native").ours)


def make_case(model, num_state_slots: int = 0):
    kv = KVTensors(model.facts, KVSizing(40, 4, 0, num_state_slots))
    batch = InputBatch(max_num_seqs=NUM_ROWS, max_model_len=64, block_size=4)
    recorder = CountingRecorder()
    for stack in kv.stacks:
        stack.normal_(generator=torch.Generator().manual_seed(1))
    graphs = DecodeGraphs(
        model.model, kv.layers, sizes=[1, 4], num_groups=1, vocab_size=model.facts.vocab_size,
        max_model_len=64, block_size=4, device=torch.device("cpu"), record=recorder,
        state_layers=kv.states.layers,
    )  # fmt: skip
    return model.model, kv, batch, graphs, recorder


def decode(batch: InputBatch, lengths: list[int]):
    """The inputs of a decode of rows of these lengths, each entered with its blocks."""
    names = [f"r{index}" for index in range(len(lengths))]
    blocks = iter(range(1, 40))
    step = plan(
        [(name, 1, length - 1, []) for name, length in zip(names, lengths, strict=True)],
        admitted=[
            admitted(name, length, [next(blocks) for _ in range(-(-length // 4))])
            for name, length in zip(names, lengths, strict=True)
        ],
    )
    apply(batch, step)
    return batch.gather(step)


@torch.inference_mode()
def test_a_replay_yields_the_logits_and_the_cache_of_the_forward_itself(case):
    model, kv, batch, graphs, recorder = case
    inputs = decode(batch, [9, 14, 3])
    kept = [stack.clone() for stack in kv.stacks]
    context = ForwardContext(kv.layers, inputs.slot_mappings, inputs.attention)
    expected = model.forward(inputs.token_ids, inputs.positions, inputs.logit_rows, context)
    after = [stack.clone() for stack in kv.stacks]
    for stack, before in zip(kv.stacks, kept, strict=True):
        stack.copy_(before)
    assert torch.equal(graphs.forward(inputs), expected)
    assert all(torch.equal(stack, wanted) for stack, wanted in zip(kv.stacks, after, strict=True))
    assert (recorder.num_recorded, recorder.num_replayed) == (2, 1)


@torch.inference_mode()
def test_drafts_are_verified_by_a_replay_of_as_many_rows(case):
    model, kv, batch, graphs, recorder = case
    step = plan(
        [("a", 3, 8, []), ("b", 1, 13, [])],
        admitted=[admitted("a", 11, [1, 2, 3]), admitted("b", 14, [4, 5, 6, 7])],
    )
    step.draft_token_ids = [[7, 9], []]
    step.samples = [True, True]
    apply(batch, step)
    inputs = batch.gather(step)
    kept = [stack.clone() for stack in kv.stacks]
    context = ForwardContext(kv.layers, inputs.slot_mappings, inputs.attention)
    expected = model.forward(inputs.token_ids, inputs.positions, inputs.logit_rows, context)
    after = [stack.clone() for stack in kv.stacks]
    for stack, before in zip(kv.stacks, kept, strict=True):
        stack.copy_(before)
    assert inputs.verifies_alone
    assert torch.equal(graphs.forward(inputs.by_token()), expected)
    assert all(torch.equal(stack, wanted) for stack, wanted in zip(kv.stacks, after, strict=True))
    assert recorder.num_replayed == 1


@torch.inference_mode()
def test_rows_of_a_larger_batch_before_leave_nothing_in_a_smaller_one(case):
    _, kv, batch, graphs, _ = case
    large = decode(batch, [9, 14, 3, 8])
    graphs.forward(large)
    after = [stack.clone() for stack in kv.stacks]
    small = InputBatch(max_num_seqs=NUM_ROWS, max_model_len=64, block_size=4)
    graphs.forward(decode(small, [9, 14]))
    # The same rows compute the same KV again, and the padding stores none.
    assert all(torch.equal(stack, wanted) for stack, wanted in zip(kv.stacks, after, strict=True))


@pytest.mark.parametrize("family", ["qwen3_5", "granitemoehybrid"])
@torch.inference_mode()
def test_a_replay_reads_and_writes_the_states_of_its_rows_alone(family, tiny_model):
    model, kv, batch, graphs, _ = make_case(tiny_model(family, "native").ours, num_state_slots=8)
    assert model.is_recordable
    large = decode(batch, [9, 14, 3, 8])
    # The last row has no part in the next step.
    states = StateBatch.of([1] * 4, [9, 14, 3, 8], [0, 1, 2, 3], [4, 1, 2, 3])
    graphs.forward(replace(large, states=states))
    inputs = decode(InputBatch(max_num_seqs=NUM_ROWS, max_model_len=64, block_size=4), [9, 14, 3])
    # Of the rows one changes its slot, one begins, and one stays.
    inputs = replace(inputs, states=StateBatch.of([1] * 3, [9, 14, 3], [5, -1, 2], [6, 0, 2]))
    kept = [stack.clone() for stack in kv.stacks]
    context = ForwardContext(
        kv.layers, inputs.slot_mappings, inputs.attention, inputs.states, kv.states.layers
    )
    assert context.can_be_recorded
    expected = model.forward(inputs.token_ids, inputs.positions, inputs.logit_rows, context)
    after = [stack.clone() for stack in kv.stacks]
    for stack, before in zip(kv.stacks, kept, strict=True):
        stack.copy_(before)
    assert torch.equal(graphs.forward(inputs), expected)
    assert all(torch.equal(stack, wanted) for stack, wanted in zip(kv.stacks, after, strict=True))


@torch.inference_mode()
def test_logits_are_copied_only_where_they_are_not_those_of_all_rows_in_order(case):
    _, _, batch, graphs, _ = case
    inputs = decode(batch, [9, 14, 3])
    logits = graphs.forward(inputs)
    kept = logits.clone()
    assert graphs.forward(inputs).data_ptr() == logits.data_ptr()
    # As many as rows, but of a row's prompt and of another's token.
    others = replace(inputs, logit_rows=torch.tensor([2, 0, 1]), sampling_rows=inputs.rows[2:])
    assert torch.equal(graphs.forward(others), kept[[2, 0, 1]])
    assert torch.equal(
        graphs.forward(replace(inputs, logit_rows=torch.arange(3).repeat(2))), kept.repeat(2, 1)
    )


def test_only_batches_up_to_the_largest_size_have_room(case):
    graphs = case[3]
    assert graphs.has_room(4)
    assert not graphs.has_room(5)


def test_sizes_end_with_the_largest_batch():
    assert decode_sizes(3) == [1, 2, 3]
    assert decode_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert decode_sizes(256)[-2:] == [248, 256]
    assert decode_sizes(600)[-1] == 600
