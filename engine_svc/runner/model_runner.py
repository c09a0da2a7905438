"""Runs a plan: enters and releases rows, one forward over all its tokens, samples. Knows no scheduler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine_svc.core.control import WakeTag
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import AdmittedRequest, StepCosts, StepPlan
from engine_svc.model.context import ForwardContext, HiddenStates
from engine_svc.model.decoder import Largest, Model, SharedModel, finds_largest
from engine_svc.model.expert_exchange import GroupExchange
from engine_svc.model.facts import ModelFacts
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.runner.core_features import with_core_features
from engine_svc.runner.cuda_graphs import DecodeGraphs
from engine_svc.runner.failures import raise_translated
from engine_svc.runner.feature import FeaturePart, RunnerContext, RunnerFeature, RunnerFeatures
from engine_svc.runner.input_batch import InputBatch, StepInputs
from engine_svc.runner.memory.kv_tensors import KVTensors
from engine_svc.runner.memory.state_tensors import unused_states
from engine_svc.runner.preparer import OnPrepared, Preparer
from engine_svc.runner.profiler import Profiler
from engine_svc.runner.running_step import RunningStep
from engine_svc.runner.sampler import LogprobsMode, Sampled, Sampler
from engine_svc.runner.sampling.transfer import to_device
from engine_svc.runner.sleep import Resident, WeightSource
from engine_svc.runner.state_rows import StateRows
from engine_svc.runner.step_costs import StepTimer, measure_costs
from engine_svc.runner.step_drafts import MakeStepDrafts, NoDrafting
from engine_svc.runner.warm_up import rows_to_compute, warm_up_sampler
from engine_svc.tensors.to_torch import torch_dtype
from triptych_kernels import AttentionBatch, Ops

# So many that the end of a text of equal tokens has occurred before.
_REHEARSED_TOKENS = 4


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """The sizes that rows and block tables are made for, and which logprobs are returned."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS


MakeFeatures = Callable[[RunnerContext], Sequence[RunnerFeature]]
# Called with the number of a step, and its rows for which a feature raised, with what it raised.
OnFailed = Callable[[int, Mapping[int, str]], object]


class ModelRunner:
    """Owns the rows and the KV tensors; runs one plan after the other."""

    def __init__(
        self,
        model: Model,
        facts: ModelFacts,
        kv: KVTensors,
        config: RunnerConfig,
        ops: Ops,
        *,
        make_features: MakeFeatures = lambda context: (),
        make_drafting: MakeStepDrafts = NoDrafting,
        graphs: DecodeGraphs | None = None,
        source: WeightSource | None = None,
        exchange: GroupExchange | None = None,
        is_last_stage: bool = True,
        on_failed: OnFailed | None = None,
        on_prepared: OnPrepared = lambda number, failure: None,
    ) -> None:
        """exchange: for a model whose experts are divided over engines, which run steps together.

        on_failed: for a rank whose results are not read; called before a step's forward.
        on_prepared: called in the thread that prepares extras.
        """
        self._kv = kv
        self._ops = ops
        self._exchange = exchange
        self._on_failed = on_failed
        self._profiler = Profiler()
        self._max_model_len, self._max_num_seqs = config.max_model_len, config.max_num_seqs
        # On a CPU the reference ops compute half precision, even if `ops` are others.
        is_reference = kv.device.type == "cpu" and facts.dtype == "float16"
        self._needs_clean_blocks = ops.needs_clean_blocks or is_reference
        self._batch = InputBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_groups=len(facts.groups),
            states=_state_rows(facts, kv, config),
            device=kv.device,
        )
        context = RunnerContext(
            model=model,
            device=kv.device,
            dtype=torch_dtype(facts.dtype),
            vocab_size=facts.vocab_size,
            max_num_seqs=config.max_num_seqs,
            ops=ops,
            token_ids=self._batch.token_ids,
            eos_token_ids=facts.eos_token_ids,
        )
        features = with_core_features(make_features(context), context)
        self._features = RunnerFeatures(features, config.max_num_seqs)
        self._resident = Resident(
            model, facts, kv, graphs=graphs, source=source, on_model=self._features.on_model
        )
        self._host_tokens = _HostTokens(self._features, kv.device)
        self.preparer = Preparer(features, on_prepared, is_last_stage=is_last_stage)
        self._sampler = Sampler(
            ops,
            max_num_seqs=config.max_num_seqs,
            vocab_size=facts.vocab_size,
            device=kv.device,
            features=self._features,
            logprobs_mode=config.logprobs_mode,
        )
        self._drafting = make_drafting(self._batch, self._sampler.draw)

    @property
    def batch(self) -> InputBatch:
        """The rows, for a stage that receives tokens sampled by another rank."""
        return self._batch

    @property
    def sampler(self) -> Sampler:
        """The sampler, for comparing the state of ranks."""
        return self._sampler

    @property
    def collectives(self) -> Mapping[str, Callable[..., object]]:
        """Functions of features that an operator may have this rank run, by name."""
        return self._features.collectives()

    def execute(self, plan: StepPlan) -> RunningStep:
        """Run the plan; every row that samples gets one token, and one for each accepted draft.

        Without drafts it never waits for the device.

        After an error the next plan must release all rows, including those of this plan, even if they were
        not entered yet. Raises DeviceLost, DeviceFull and PeersLost if no request is at fault.
        """
        try:
            return self._execute(plan)
        except (RuntimeError, MemoryError) as error:
            raise_translated(error)

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> RunningStep:
        model = self._resident.awake_model()
        has_drafts = any(plan.draft_token_ids)
        self._profiler.begin_step()
        with self._profiler.range("apply"):
            drafting = self._drafting
            is_plain = drafting.is_idle and not has_drafts
            if not is_plain or plan.released:
                drafting.read(plan, has_drafts=has_drafts)
            self._apply(plan)
            if not plan.request_ids:
                return self._take_part(plan, model)
            if not is_plain:
                plan = drafting.settle(plan, has_drafts=has_drafts)
            inputs = self._batch.gather(plan)
        features = self._features
        context = ForwardContext(
            self._kv.layers,
            inputs.slot_mappings,
            inputs.attention,
            inputs.states,
            self._kv.states.layers,
        )
        if not is_plain:
            context.hidden = drafting.wanted_hidden()
        if features.reads_hidden(inputs.rows):
            context.last = HiddenStates(())
        features.before_forward(inputs, context)
        num_sampling = len(inputs.sampling_rows)
        extra = features.extra_positions(inputs)
        if self._on_failed is not None and (failed := features.failed(inputs.rows)):
            # Errors raised after the forward are reported with the next step: it is the first to read this
            # step's tokens.
            self._on_failed(plan.step_number, failed)
        if extra:
            inputs = inputs.with_logits_of([positions for _, positions in extra])
        reads_tokens = features.reads_tokens(inputs.sampling_rows)
        beside = self._host_tokens.given(inputs) if reads_tokens else nullcontext()
        with self._profiler.range("forward"), beside:
            found = self._forward(model, inputs, context, needs_all=bool(extra))
        if context.hidden is not None:
            with self._profiler.range("observe"):
                drafting.observe(inputs, context.hidden)
        parts: list[FeaturePart] = []
        if context.last is not None and context.last.tensors:
            parts += features.after_forward(inputs, context.last.joined(), model)
        # An earlier stage of a pipeline has no logits.
        if extra and isinstance(found, Tensor) and found.shape[0]:
            parts += features.before_sampling(inputs, found[num_sampling:], extra)
            found = found[:num_sampling]
        with self._profiler.range("sample"):
            sampled = self._choose(inputs, found)
        if sampled is not None:
            parts += sampled.parts
        failed = features.failed(inputs.rows)
        step = RunningStep(
            plan,
            sampled,
            self._kv.device,
            inputs.rows,
            parts=parts,
            failed=failed,
            drafts=inputs.drafts,
            counts_drafts=has_drafts,
            check=self._check,
        )
        if sampled is not None:
            if reads_tokens:
                features.keep_sampled(inputs.sampling_rows, step.sampled_ids)
            drafting.keep(inputs, step)
        return step

    def _take_part(self, plan: StepPlan, model: Model) -> RunningStep:
        """A step without tokens of this engine; computes those of other engines, if experts are shared."""
        if self._exchange is not None:
            assert isinstance(model, SharedModel), "an engine that exchanges tokens has a shared model"
            with self._profiler.range("take part"):
                model.take_part()
        return RunningStep(plan, None, self._kv.device)

    def _check(self) -> None:
        if self._exchange is not None:
            self._exchange.check()

    def _choose(self, inputs: StepInputs, found: Tensor | Largest) -> Sampled | None:
        """Choose tokens and write them where the next step reads them. None if no row samples here."""
        rows, positions, token_ids = inputs.sampling_rows, inputs.sampling_positions, self._batch.token_ids
        num_found = (found.tokens if isinstance(found, Largest) else found).shape[0]
        if not len(rows) or not num_found:
            return None
        if isinstance(found, Largest):
            sampled = self._sampler.choose_most(found, rows, positions, token_ids)
        else:
            sampled = self._sampler.choose(found, rows, positions, token_ids)
        self._batch.append(rows, positions, sampled.token_ids)
        return sampled

    @torch.inference_mode()
    def warm_up(self, num_tokens: int) -> None:
        """Run forwards that store nothing, so that weights are read and kernels compiled in advance.

        num_tokens: the maximum that a step computes.
        """
        for count, total in rows_to_compute(num_tokens, self._max_model_len, self._kv.device):
            self._compute_alone([count], total)
        if self._kv.device.type != "cpu":
            vocab_size = self._resident.facts.vocab_size
            warm_up_sampler(self._sampler, self._features, vocab_size, self._batch.token_ids)

    def _compute_alone(self, counts: Sequence[int], total: int) -> Tensor:
        """Run rows that belong to no request: `counts[i]` new tokens that end a context of `total` tokens.

        Attention reads block 0, whatever it holds; nothing is stored. Returns logits [len(counts), V].
        """
        device = self._kv.device
        positions = torch.cat([torch.arange(total - count, total, device=device) for count in counts])
        slots = torch.full_like(positions, -1)
        size = self._kv.sizing.block_size
        table = torch.zeros(len(counts), -(-total // size), dtype=torch.int32, device=device)
        batch = AttentionBatch.of(table, counts, [total] * len(counts), size)
        groups = range(self._batch.num_groups)
        context = ForwardContext(
            self._kv.layers,
            [slots for _ in groups],
            [batch for _ in groups] or [batch],
            unused_states(self._resident.facts, counts, [total] * len(counts), device),
            self._kv.states.layers,
        )
        with nullcontext() if self._exchange is None else self._exchange.alone():
            return self._resident.awake_model().forward(
                torch.zeros_like(positions),
                positions,
                torch.tensor(counts, device=device).cumsum(0) - 1,
                context,
            )

    @torch.inference_mode()
    def step_costs(self, max_positions: int) -> StepCosts:
        """Measured times of steps of up to `max_positions` positions. All ranks measure at the same time."""
        vocab_size = self._resident.facts.vocab_size
        timer = StepTimer(
            self._ops, self._kv.device, vocab_size, self._compute_alone, self._drafting, self._rehearse
        )
        return measure_costs(timer, max_positions, self._max_num_seqs, self._max_model_len)

    def _rehearse(self, num_rows: int, num_drafts: int) -> None:
        """Run a step of rows that belong to no request, whose short text repeats itself.

        They read and write block 0, which no request reads.
        """
        names = [f"rehearsed {index}" for index in range(num_rows)]
        sampling = SamplingParams(1, temperature=0.0)
        no_blocks: list[list[int]] = [[0] for _ in range(self._batch.num_groups)]
        plan = StepPlan(
            0,
            admitted=[
                AdmittedRequest(name, [1] * _REHEARSED_TOKENS, _REHEARSED_TOKENS, sampling, no_blocks)
                for name in names
            ],
            request_ids=names,
            num_tokens=[1 + num_drafts] * num_rows,
            num_computed_tokens=[_REHEARSED_TOKENS - 1] * num_rows,
            new_block_ids=[[]] * num_rows,
            draft_token_ids=[[-1] * num_drafts for _ in names],
            samples=[True] * num_rows,
        )
        try:
            with nullcontext() if self._exchange is None else self._exchange.alone():
                self._execute(plan).result()
        finally:
            end = StepPlan(0, released=names)
            self._drafting.read(end, has_drafts=False)
            self._apply(end)

    def sleep(self, level: int) -> None:
        """See Resident.sleep. No step may be in flight, and no request may keep its KV."""
        if level:
            self._drafting.release_cache()
        self._resident.sleep(level)

    def wake(self, tags: Collection[WakeTag] = tuple(WakeTag)) -> None:
        self._resident.wake(tags)
        if WakeTag.KV_CACHE not in self._resident.asleep:
            self._drafting.allocate_cache()

    def reload_weights(self, folder: Path | None = None, names: Collection[str] = ()) -> ModelFacts:
        """See Resident.reload. Cached KV belongs to the old weights."""
        return self._resident.reload(folder, names)

    def save_weights(self, folder: Path) -> Path:
        """Write this rank's packed weights for later starts; returns the file. ValueError if it has none."""
        model = self._resident.awake_model()
        packed = model.packed if isinstance(model, NativeDecoder) else None
        if packed is None:
            raise ValueError(
                "only weights of native models on a CPU can be written, of one folder, with experts that are "
                "not divided over engines"
            )
        return packed.save(folder)

    def start_profile(self, folder: Path, prefix: str = "engine") -> Path:
        """Record steps from now on, in the thread that runs them; returns the file to be written."""
        return self._profiler.start(folder, prefix)

    def stop_profile(self) -> Path:
        return self._profiler.stop()

    def _apply(self, plan: StepPlan) -> None:
        # Row by row, so that after an error batch and sampler agree on which rows are in use.
        for row in self._batch.release(plan.released):
            self._sampler.leave(row)
            self._features.remove_row(row)
            self._drafting.remove_row(row)
        for admitted in plan.admitted:
            row = self._batch.enter(admitted)
            # First, as the others may raise: the row is released in any case.
            self._drafting.add_row(row, admitted)
            admitted = self.preparer.with_prepared(admitted)
            self._features.add_row(row, admitted)
            self._sampler.enter(row, admitted)
        fresh = self._batch.extend(plan)
        if fresh:
            self._kv.reach(max(fresh))
        if self._needs_clean_blocks:
            self._kv.clear(fresh)

    def _forward(
        self, model: Model, inputs: StepInputs, context: ForwardContext, *, needs_all: bool
    ) -> Tensor | Largest:
        """Logits [N, V]; unless `needs_all`, only those of rows that read more than the largest."""
        graphs = self._resident.graphs
        is_recorded = context.can_be_recorded and (inputs.is_decode or inputs.verifies_alone)
        if graphs is not None and is_recorded and graphs.has_room(inputs.token_ids.shape[0]):
            return graphs.forward(inputs if inputs.is_decode else inputs.by_token())
        # Recorded steps compute all logits; an engine with recorded steps runs few others.
        if graphs is None and not needs_all and finds_largest(model):
            readers = self._sampler.readers(inputs.sampling_rows)
            if len(readers) < len(inputs.sampling_rows):
                kept = to_device(readers, self._kv.device)
                return model.forward_greedy(
                    inputs.token_ids, inputs.positions, inputs.logit_rows, context, kept
                )
        return model.forward(inputs.token_ids, inputs.positions, inputs.logit_rows, context)


def _state_rows(facts: ModelFacts, kv: KVTensors, config: RunnerConfig) -> StateRows | None:
    if not facts.state_shapes:
        return None
    return StateRows(
        max_num_seqs=config.max_num_seqs, block_size=config.block_size, first_id=kv.sizing.num_blocks
    )


class _HostTokens:
    """Gives features the newest tokens while a forward runs.

    On a CPU in a thread: the tokens are known, and the forward leaves the interpreter to others. On a GPU
    once the forward is launched, as the tokens may be those of a step that still runs.
    """

    def __init__(self, features: RunnerFeatures, device: torch.device) -> None:
        self._features = features
        # Its thread starts when it is first used.
        self._thread = ThreadPoolExecutor(1, "host-tokens") if device.type == "cpu" else None

    @contextmanager
    def given(self, inputs: StepInputs) -> Iterator[None]:
        """Around the launch of a forward."""
        if self._thread is None:
            yield
            self._give(inputs)
            return
        given = self._thread.submit(self._give, inputs)
        try:
            yield
        finally:
            # Also after an error: the rows of the features are released next.
            given.result()

    @torch.inference_mode()
    def _give(self, inputs: StepInputs) -> None:
        self._features.on_tokens(inputs.sampling_rows, inputs.sampling_positions, inputs.drafts)
