"""A model over several processes: the same tokens, half the memory, little said, one end for all of them."""

from __future__ import annotations

import asyncio
import importlib
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_svc.build.engine import Core, build_core
from engine_svc.build.ranks import RankedSide, build_ranks
from engine_svc.build.runner import build_runner
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.control import Refused, WeightsLost
from engine_svc.core.request import FinishReason, Request
from engine_svc.core.step import AdmittedRequest, StepPlan
from engine_svc.features.prompt_embeds.extras import PromptEmbeds
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Abort, Add, Fail, Inbox, Outbox, Prepared, StatsSnapshot
from engine_svc.loop.preparation import Preparations
from engine_svc.loop.protocols import NoLockstep
from engine_svc.loop.step_output import FinishedRow
from engine_svc.model.process_parallel import RankPosition
from engine_svc.process.engine_thread import EXIT_LOOP_FAILED
from engine_svc.ranks.process_group import GroupLimits, RankLaunch, RanksStarting
from engine_svc.ranks.watch import RankLost
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.tensors.host_tensor import HostTensor
from tests.engine_svc.core_state import num_unfinished
from tests.engine_svc.request_options import split_options
from tests.engine_svc.runner.chains import Chain
from tests.processes import running, source_environment
from tests.system.checkpoints import Reference
from tests.system.generation import collect, random_prompt, request_of
from tests.system.ranks import (
    VOCAB_SIZE,
    Driver,
    config_of,
    greedy,
    is_there,
    make_checkpoint,
    mixed_sampling,
    named_segments,
    ranks_of,
    wait_for_end,
)
from tests.system.stack import Stack
from tests.triptych_kit.plugin_folder import write_feature
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc
from triptych_kit.clock import MonotonicClock

pytestmark = pytest.mark.chaos

FAMILIES = (
    "llama", "phi3", "qwen2", "mixtral", "qwen3_moe", "gemma3", "olmo3", "gpt_oss", "qwen3_5_moe",
    "granitemoehybrid",
)  # fmt: skip
NUM_REQUESTS = 12
TP_2 = {"tensor_parallel_size": 2}
PP_2 = {"pipeline_parallel_size": 2}
EP_2 = {**TP_2, "expert_parallel": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ranked")
    return {family: make_checkpoint(family, root / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, tuple[dict[str, list[int]], int]]:
    """Of each model on one rank: the tokens of all requests, and the bytes of its parameters."""
    answers = {}
    for family, folder in folders.items():
        side = build_runner(config_of(folder), lambda phase, done, total: None)
        answers[family] = with_requests(Driver(side)).run(), 4 * side.model.num_parameters
        side.executor.shutdown()
    return answers


def with_requests(driver: Driver) -> Driver:
    for index in range(NUM_REQUESTS):
        sampling = greedy() if index % 2 else mixed_sampling(index, max_tokens=64)
        driver.add(f"request-{index}", sampling)
    return driver


@pytest.mark.parametrize(
    ("family", "division"),
    [
        ("llama", TP_2),
        ("llama", PP_2),
        ("phi3", TP_2),
        ("qwen2", PP_2),
        ("mixtral", EP_2),
        ("qwen3_moe", EP_2),
        ("gemma3", TP_2),
        ("gemma3", PP_2),
        ("olmo3", TP_2),
        ("gpt_oss", TP_2),
        ("gpt_oss", EP_2),
        ("qwen3_5_moe", TP_2),
        ("granitemoehybrid", TP_2),
    ],
    ids=[
        "llama-tp2",
        "llama-pp2",
        "phi3-tp2",
        "windows-pp2",
        "mixtral-ep2",
        "qwen3-moe-ep2",
        "gemma3-tp2",
        "gemma3-pp2",
        "olmo3-tp2",
        "gpt-oss-tp2",
        "gpt-oss-ep2",
        "delta-rule-tp2",
        "state-scan-tp2",
    ],
)
def test_ranks_say_what_one_says_and_hold_their_share(family, division, folders, alone):
    expected, whole_bytes = alone[family]
    num_ranks = division.get("tensor_parallel_size", 1) * division.get("pipeline_parallel_size", 1)
    excess = []
    with ranks_of(config_of(folders[family], **division)) as ranked:

        def launch_counted(plan: StepPlan, launch) -> None:
            before = ranked.group.num_plan_bytes
            launch()
            if not plan.admitted and all(count == 1 for count in plan.num_tokens):
                excess.append(ranked.group.num_plan_bytes - before - 12 * len(plan.request_ids))

        driver = with_requests(Driver(ranked.side, on_launch=launch_counted))
        outputs = driver.run()
    assert outputs == expected
    assert min(len(set(outputs[f"request-{index}"])) for index in range(1, NUM_REQUESTS, 2)) >= 20
    assert driver.num_preempted > 0
    shares = [num_bytes / whole_bytes for num_bytes in ranked.num_bytes]
    print(
        f"\n{family} {division}: bytes of parameters {whole_bytes} in one rank, {list(ranked.num_bytes)} in "
        f"{num_ranks}, {[f'{share:.0%}' for share in shares]}; {len(excess)} decode steps, each at most "
        f"12 bytes a row and {max(excess)} more"
    )
    assert all(abs(share - 1 / num_ranks) < 0.05 for share in shares)
    assert len(excess) > 50
    assert max(excess) <= 256


# A feature of another package, whose requests name the stage in which it raises, in all ranks or in one.
MARKS = """
from dataclasses import dataclass

from engine_svc.core.extras import Extra

@dataclass(frozen=True)
class Mark(Extra):
    stage: str

EXTRAS = (Mark,)
"""
RAISING = """
import torch.distributed as dist

from engine_svc.runner.feature import RunnerFeature
from feature_raising.extras import Mark

def make(config, context):
    return Raising()

class Raising(RunnerFeature):
    def __init__(self):
        self._stage_of = {}

    def uses(self, admitted):
        return Mark in admitted.extras

    def add_row(self, row, admitted):
        self._stage_of[row] = admitted.extras[Mark].stage
        self._raise_in("add_row", [row])

    def remove_row(self, row):
        del self._stage_of[row]

    def before_forward(self, inputs, context):
        self._raise_in("before_forward", inputs.rows.tolist())

    def apply(self, logits, some, positions, token_ids):
        self._raise_in("apply", some.rows.tolist())

    def after_sampling(self, logits, token_ids, some):
        rows = some.rows.tolist()
        self._raise_in("after_sampling", rows)
        return lambda: self._raise_in("part", rows) or {row: Mark("seen") for row in rows}

    def _raise_in(self, stage, rows):
        if any(self._stage_of.get(row) in (stage, f"{stage} in {dist.get_rank()}") for row in rows):
            raise ValueError("no luck")
"""


@pytest.mark.parametrize(
    ("division", "early", "late"),
    [
        # Where the rank that reports knows no better, the request has its valid token of the step.
        (TP_2, ["add_row in 1", "before_forward in 1"], ["apply in 1", "after_sampling in 1"]),
        (PP_2, ["add_row in 0", "before_forward in 0"], []),
    ],
    ids=["tp2", "pp2"],
)
def test_a_feature_that_raises_in_ranks_ends_its_rows_alone(
    division: dict[str, int],
    early: list[str],
    late: list[str],
    folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The ranks are given what this process finds.
    monkeypatch.syspath_prepend(write_feature(tmp_path, "raising", extras=MARKS, runner=RAISING))
    mark = importlib.import_module("feature_raising.extras").Mark
    rng = random.Random(8)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(5 + 20 * index)] for index in range(4)]
    marked = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
    with ranks_of(config_of(folders["llama"], **division)) as ranked:
        driver = Driver(ranked.side)

        def plain_of(stage: str) -> list[list[int]]:
            """The tokens of requests without the feature, while there is one that raises in this stage."""
            for index, prompt in enumerate(prompts):
                driver.add_prompt(f"{stage}-{index}", prompt, mixed_sampling(index, max_tokens=8))
            driver.add_prompt(stage, marked, greedy(max_tokens=8), mark(stage))
            driver.run()
            return [driver.outputs[f"{stage}-{index}"] for index in range(len(prompts))]

        expected = plain_of("none")
        assert (driver.errors, driver.extras["none"]) == ({}, [mark("seen")] * 8)
        for stage in ("add_row", "before_forward", "apply", "after_sampling", "part", *early, *late):
            assert plain_of(stage) == expected, stage
            assert driver.errors.pop(stage) == "Raising failed: ValueError: no luck"
            num_valid = stage in late
            assert driver.outputs[stage] == driver.outputs["none"][:num_valid], stage
            assert (driver.errors, driver.extras[stage]) == ({}, [mark("seen")] * num_valid), stage
        # A step later the ranks have released the rows of all.
        assert plain_of("none again") == expected
        answers = ranked.group.call("digest")
        assert len({answer["batch"] for answer in answers}) == 1
        # Only the last stage samples.
        assert division == PP_2 or len({answer["sampler"] for answer in answers}) == 1


CHAINS = """
from tests.engine_svc.runner.chains import Chain

EXTRAS = (Chain,)
"""
CHAIN_ROWS = """
import torch.distributed as dist

from engine_svc.core.errors import RequestFailed
from tests.engine_svc.runner.chains import ChainRows

def make(config, context):
    return ChainsOfRank(context.vocab_size)

class ChainsOfRank(ChainRows):
    def prepare(self, extra):
        if extra.how == f"bad in {dist.get_rank()}":
            raise RequestFailed("INVALID_ARGUMENT", "the chain is bad")
        if extra.how == f"hangs in {dist.get_rank()}":
            self.gate.wait()
        return super().prepare(extra)
"""


def engine_over(ranked: RankedSide, inbox: Inbox) -> tuple[Core, Engine]:
    """The scheduler and the loop of these ranks, whose requests wait until they are prepared."""
    side, clock = ranked.side, MonotonicClock()
    preparations = Preparations(side.preparing, clock)
    in_flight = side.steps_in_flight
    core = build_core(
        SchedulerConfig(
            max_model_len=side.max_model_len,
            max_num_seqs=8,
            max_num_batched_tokens=48,
            async_scheduling=in_flight > 1,
            max_steps_in_flight=in_flight,
        ),
        CacheConfig(side.num_kv_blocks + 1, (FullAttention(4),)),
        features=[preparations],
    )
    engine = Engine(
        scheduler=core.scheduler,
        executor=side.executor,
        inbox=inbox,
        stats_snapshot=StatsSnapshot(),
        clock=clock,
        lockstep=NoLockstep(),
        preparations=preparations,
        max_in_flight=in_flight,
    )
    return core, engine


@pytest.mark.parametrize(
    ("division", "depth"), [(TP_2, 1), (TP_2, 2), (PP_2, 2)], ids=["tp2", "tp2-in-flight", "pp2"]
)
def test_every_rank_that_samples_prepares_and_follows_its_rows(
    division: dict[str, int], depth: int, folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_feature(tmp_path, "chains", extras=CHAINS, runner=CHAIN_ROWS))
    inbox, outbox = Inbox(100), Outbox(max_bytes=1 << 24, wake=lambda: None)
    config = config_of(folders["llama"], steps_in_flight=depth, num_kv_blocks=20, **division)
    with ranks_of(config, on_prepared=lambda *answer: inbox.put(Prepared(*answer))) as ranked:
        core, engine = engine_over(ranked, inbox)
        requests: dict[int, Request] = {}
        ends: dict[int, FinishedRow] = {}

        def add(handle: int, *chains: Chain) -> None:
            sampling, extras = split_options(**greedy(30), temperature=1.0, seed=handle)
            rng = random.Random(handle)
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(5 + 4 * handle)]
            requests[handle] = Request(
                f"r{handle}",
                prompt,
                len(prompt),
                sampling,
                extras=extras | {type(one): one for one in chains},
            )
            inbox.put(Add(requests[handle], outbox, handle))

        def run(num_ends: int) -> None:
            while len(ends) < num_ends:
                if not engine.turn():
                    inbox.wait(0.1)
                while (step := outbox.take()) is not None:
                    ends.update({step.handles[end.row]: end for end in step.finished})

        # Of two stages the last one samples.
        late = 1
        add(0, Chain(3, f"bad in {late}"))
        add(1, Chain(3))
        add(2)
        add(3, Chain(5))
        add(4, Chain(4, f"hangs in {late}"))
        run(4)
        inbox.put(Abort("r4"))
        # What was answered by one rank alone is dropped by both, and those behind it are prepared.
        add(5, Chain(2))
        add(6, Chain(2, "bad in 0"))
        run(7)
        engine.settle()
        assert (ends[0].code, ends[0].message) == ("INVALID_ARGUMENT", "the chain is bad")
        assert ends[4].reason is FinishReason.ABORT
        # The first stage is not asked.
        is_divided = division == TP_2
        assert ends[6].reason is (FinishReason.ERROR if is_divided else FinishReason.LENGTH)
        assert [requests[handle].num_output_tokens for handle in (0, 1, 2, 3, 4, 5)] == [0, 30, 30, 30, 0, 30]
        for handle in (1, 3, 5):
            request = requests[handle]
            chain = request.extras[Chain]
            assert chain.keeps(request.token_ids, request.num_prompt_tokens, VOCAB_SIZE)
        assert sum(request.num_preemptions for request in requests.values()) > 0
        assert core.kv_cache.num_used_blocks == 0


@pytest.mark.chaos
def test_a_rank_that_is_lost_while_it_prepares_ends_the_engine_and_not_the_request(
    folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(write_feature(tmp_path, "chains", extras=CHAINS, runner=CHAIN_ROWS))
    inbox, outbox = Inbox(100), Outbox(max_bytes=1 << 24, wake=lambda: None)
    with ranks_of(
        config_of(folders["llama"], **TP_2),
        on_lost=lambda lost: inbox.put(Fail(lost)),
        on_prepared=lambda *answer: inbox.put(Prepared(*answer)),
    ) as ranked:
        core, engine = engine_over(ranked, inbox)
        sampling, extras = split_options(**greedy(3))
        blocked = Request("r0", [1, 2, 3], 3, sampling, extras=extras | {Chain: Chain(3, "hangs in 1")})
        inbox.put(Add(blocked, outbox, 0))
        inbox.put(Add(Request("r1", [1, 2, 3], 3, sampling), outbox, 1))
        while num_unfinished(core.scheduler) != 1:
            engine.turn()
        os.kill(ranked.group.process_ids[1], signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 was killed by SIGKILL"):
            engine.run()
    ends = []
    while (step := outbox.take()) is not None:
        ends += [step.handles[end.row] for end in step.finished]
    assert (ends, core.scheduler.waiting_ids) == ([1], ["r0"])


def test_embeddings_of_tokens_are_answered_by_stages_as_the_tokens_are(folders) -> None:
    weights = load_file(folders["llama"] / "model.safetensors")["model.embed_tokens.weight"]
    rng = random.Random(5)
    with ranks_of(config_of(folders["llama"], enable_prompt_embeds=True, **PP_2)) as ranked:
        driver = Driver(ranked.side)
        for index, length in enumerate((1, 5, 40, 90)):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
            positions = tuple(range(index % 2, length))
            rows = weights[torch.tensor(prompt)[list(positions)]]
            embeds = HostTensor("float32", tuple(rows.shape), rows.numpy().tobytes())
            hidden = [0 if position in positions else token for position, token in enumerate(prompt)]
            driver.add_prompt(f"tokens-{index}", prompt, greedy(24))
            driver.add_prompt(f"embeds-{index}", hidden, greedy(24), PromptEmbeds(embeds, positions))
        outputs = driver.run()
    for index in range(4):
        assert outputs[f"embeds-{index}"] == outputs[f"tokens-{index}"]
    assert len({token for tokens in outputs.values() for token in tokens}) > 10


@pytest.mark.parametrize("division", [TP_2, PP_2], ids=["tp2", "pp2"])
def test_ranks_are_in_the_same_state_after_1000_steps(division: dict[str, int], folders) -> None:
    with ranks_of(config_of(folders["llama"], **division)) as ranked:
        driver = Driver(ranked.side, seed=4)
        digests: list[str] = []
        num_added = 0
        while driver.num_steps < 1000:
            # There are always some that wait, so that requests come and go all the time.
            while num_added < len(driver.outputs) + 12:
                driver.add(f"request-{num_added}", mixed_sampling(num_added, 5 + num_added * 7 % 60))
                num_added += 1
            driver.step()
            if driver.num_steps % 250 == 0:
                answers = ranked.group.call("digest")
                assert len({answer["batch"] for answer in answers}) == 1
                # Only the last stage samples, and forgets rules that no longer bind as it does.
                assert division == PP_2 or len({answer["sampler"] for answer in answers}) == 1
                digests.append(str(answers[0]["batch"]))
        print(
            f"\n{division}: {driver.num_steps} steps, {num_added} requests, {driver.num_preempted} "
            f"preemptions; the ranks' digests: {[digest[:12] for digest in digests]}"
        )
        assert driver.num_preempted > 0
    assert len(set(digests)) == len(digests) >= 4


@pytest.mark.parametrize(
    ("how", "why"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "sent no heartbeat")],
    ids=["killed", "stopped"],
)
def test_a_rank_that_ends_or_stops_is_seen_in_a_step(how: signal.Signals, why: str, folders) -> None:
    with ranks_of(config_of(folders["llama"], **TP_2)) as ranked:
        driver = with_requests(Driver(ranked.side))
        for _ in range(10):
            driver.step()
        num_before = driver.num_steps
        os.kill(ranked.group.process_ids[1], how)
        happened_at = time.monotonic()
        with pytest.raises(RankLost, match=f"rank 1 {why}") as caught:
            driver.run()
        seen_s = time.monotonic() - happened_at
        print(f"\n{how.name} seen in {seen_s:.3f} s")
        assert caught.value.rank == 1
        # The rank had part in those that were under way, and in no other.
        assert driver.num_steps <= num_before + ranked.side.steps_in_flight + 1
        with pytest.raises(RankLost, match=why):
            driver.step()


def test_a_rank_that_ends_while_idle_is_reported(folders) -> None:
    losses: queue.SimpleQueue[RankLost] = queue.SimpleQueue()
    with ranks_of(config_of(folders["llama"], **PP_2), on_lost=losses.put) as ranked:
        os.kill(ranked.group.process_ids[0], signal.SIGKILL)
        assert losses.get(timeout=20).rank == 0
        with pytest.raises(RankLost, match="rank 0 was killed by SIGKILL"):
            with_requests(Driver(ranked.side)).run()


def test_an_error_in_a_rank_ends_all_of_them_and_is_reported(folders) -> None:
    with ranks_of(config_of(folders["llama"], **TP_2)) as ranked:
        plan = StepPlan(
            1,
            admitted=[AdmittedRequest("r", [1, 2, 3], 3, split_options(**greedy())[0], [[1]])],
            request_ids=["r"],
            num_tokens=[3],
            num_computed_tokens=[0],
            new_block_ids=[[]],
            draft_token_ids=[[2]],
            samples=[True],
        )
        pending = ranked.group.launch(plan)
        with pytest.raises(RankLost, match="raised ValueError: step 1 has drafts"):
            pending.result()


def test_ranks_that_have_lost_their_weights_live_and_are_woken_with_the_old_ones(folders, alone, tmp_path):
    folder = Path(shutil.copytree(folders["llama"], tmp_path / "model"))
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    with ranks_of(config_of(folder, **TP_2)) as ranked:
        file.write_bytes(whole[:-100])
        with pytest.raises(WeightsLost, match="is truncated"):
            ranked.side.control.call_all("reload_weights", {"folder": None, "names": []})
        with pytest.raises(Refused, match="is truncated"):
            ranked.side.control.call_each("wake", {"tags": ["weights"]})
        file.write_bytes(whole)
        ranked.side.control.call_each("wake", {"tags": ["weights"]})
        assert with_requests(Driver(ranked.side)).run() == alone["llama"][0]


def test_named_tensors_are_replaced_in_all_ranks(folders, alone, tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    tensor = load_file(folders["llama"] / "model.safetensors")[name]
    for folder, replacement in ("fitting", tensor * -0.5), ("turned", tensor.T.contiguous()):
        (tmp_path / folder).mkdir()
        save_file({name: replacement}, tmp_path / folder / "model.safetensors")
    with ranks_of(config_of(folders["llama"], **TP_2)) as ranked:
        control = ranked.side.control
        with pytest.raises(Refused, match="it replaces"):
            control.call_all("reload_weights", {"folder": str(tmp_path / "turned"), "names": [name]})
        fitting = {"folder": str(tmp_path / "fitting"), "names": [name]}
        first, second = control.call_all("reload_weights", fitting)
        assert first == second
        assert with_requests(Driver(ranked.side)).run() != alone["llama"][0]


def test_ranks_run_a_step_without_requests(folders, alone):
    with ranks_of(config_of(folders["llama"], **TP_2)) as ranked:
        assert ranked.group.launch(StepPlan(1)).result().sampled == []
        assert with_requests(Driver(ranked.side)).run() == alone["llama"][0]


def test_a_rank_that_lives_but_does_not_finish_is_given_up() -> None:
    places = [RankPosition(rank, tp_size=2, pp_size=1) for rank in range(2)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    starting = RanksStarting(
        places,
        RankLaunch("tests.system.deaf_rank", {"deaf": 1}, environment),
        limits=GroupLimits(step_s=0.5),
    )
    assert starting.loaded() == [{}, {}]
    group = starting.finish([{}, {}], max_num_seqs=4, num_groups=1)
    process_ids = group.process_ids
    pending = group.launch(StepPlan(1))
    with pytest.raises(RankLost, match=r"rank 1 did not finish a step in 0\.5 s"):
        pending.result()
    group.shutdown()
    assert [pid for pid in process_ids if is_there(pid)] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**TP_2, "model_impl": "transformers"}, "several ranks need a native model"),
        ({**TP_2, "num_kv_blocks": 3, "max_model_len": 256}, "needs 64 blocks"),
        ({**TP_2, "num_kv_blocks": 10**12}, "cannot be allocated; lower num_kv_blocks"),
    ],
    ids=["a-model-of-transformers", "too-few-blocks", "too-many-blocks"],
)
def test_what_ranks_cannot_do_is_refused_in_words(changes, message: str, folders) -> None:
    before = psutil.Process().children()
    with pytest.raises(ValueError, match=message):
        build_ranks(config_of(folders["llama"], **changes), lambda phase, done, total: None)
    assert psutil.Process().children() == before


PARENT = """
import sys
from pathlib import Path
from engine_svc.build.ranks import RankedSide, build_ranks
from tests.system.ranks import config_of
config = config_of(Path(sys.argv[1]), tensor_parallel_size=2)
ranked = build_ranks(config, lambda phase, done, total: None)
print(*ranked.group.process_ids, flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_a_parent_that_is_killed_even_a_stopped_one(folders) -> None:
    with running(
        *(sys.executable, "-c", PARENT, str(folders["llama"])),
        env=source_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        process_ids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(process_ids) == 2
        segments = named_segments(process_ids)
        os.kill(process_ids[0], signal.SIGSTOP)
        parent.kill()
    assert wait_for_end(process_ids) == []
    assert [segment for segment in segments if segment.exists()] == []


async def test_an_engine_serves_with_ranks_and_ends_when_one_is_killed(llama: str) -> None:
    prompt = random_prompt(random.Random(2), 20, 512)
    async with Stack() as stack:
        trio = await stack.start_all(llama, "--tensor-parallel-size=2", "--pipeline-parallel-size=2")
        answer = await collect(stack.inference(trio.frontend), request_of(prompt, 40))
        engine = engine_pb2_grpc.EngineCoreServiceStub(stack.channel(trio.engine))
        ready = (await engine.GetEngineInfo(engine_pb2.GetEngineInfoRequest(), timeout=10)).ready
        ranks = psutil.Process(trio.engine.pid).children()
        assert len(ranks) == 4
        ranks[2].kill()
        await asyncio.wait_for(trio.engine.wait(), 20)
    assert (ready.world_size, ready.tensor_parallel_size, ready.pipeline_parallel_size) == (4, 2, 2)
    assert f"exited with code {EXIT_LOOP_FAILED}" in trio.engine.ending
    assert wait_for_end([rank.pid for rank in ranks]) == []
    assert Reference(Path(llama)).generate(prompt, 40).first_real_difference(answer.token_ids) is None
