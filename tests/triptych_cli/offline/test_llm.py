from __future__ import annotations

import copy
import dataclasses
import io
import os
import pickle
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import triptych
from engine_svc.model.errors import ModelError
from tests.system.checkpoints import make_checkpoint
from tests.triptych_cli.offline.llm_rig import VOCAB_SIZE, fake_frontend, frontend_process
from triptych.common.v1 import sampling_pb2
from triptych_cli.llm import LLM, Bar, EngineDead, SamplingParams
from triptych_cli.offline.calls import MAX_IN_FLIGHT
from triptych_cli.offline.params import RepetitionDetection, StructuredOutput, from_proto
from triptych_cli.offline.results import Completion, RequestResult, Usage
from triptych_cli.services import embedded_model
from triptych_kit.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ServiceError,
    Unavailable,
)

OPTIONS = {"num_threads": 1, "num_kv_blocks": 256, "device": "cpu"}
PROMPTS = [
    "the quick brown fox",
    [5, 6, 7, 8, 9],
    "river bank",
    {"prompt_token_ids": [100, 200, 300]},
    {"prompt": "jumps over the lazy dog and runs along the river"},
]
KINDS = ("in-process", "child", "remote")
STREAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40),
    "seeded": SamplingParams(temperature=1.0, seed=7, max_tokens=40),
    "two outputs": SamplingParams(temperature=1.0, seed=7, max_tokens=20, n=2),
    "logprobs": SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2),
    "no text": SamplingParams(temperature=0.0, max_tokens=5, detokenize=False),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.fixture(scope="module")
def llms(checkpoint: Path) -> Iterator[dict[str, LLM]]:
    with (
        frontend_process(
            str(checkpoint), "--num-threads=1", "--num-kv-blocks=256", "--device=cpu"
        ) as address,
        LLM("", engine="remote", address=address) as remote,
        LLM(checkpoint, engine="child", **OPTIONS) as child,
        LLM(checkpoint, engine="in-process", **OPTIONS) as in_process,
    ):
        yield {"remote": remote, "child": child, "in-process": in_process}


def _comparable(results):
    # What is cached depends on what ran before.
    blank = {"request_id": "", "num_cached_tokens": 0, "usage": None}
    return [dataclasses.replace(result, **blank) for result in results]


@pytest.mark.parametrize("stream", STREAMS)
def test_the_three_transports_give_equal_results(llms: dict[str, LLM], stream: str) -> None:
    results = {kind: llms[kind].generate(PROMPTS, STREAMS[stream], progress=False) for kind in KINDS}
    assert (
        _comparable(results["in-process"]) == _comparable(results["child"]) == _comparable(results["remote"])
    )
    for result in results["in-process"]:
        assert len(result.outputs) == (STREAMS[stream].n or 1)
        assert all(len(output.token_ids) == STREAMS[stream].max_tokens for output in result.outputs)
        assert all(output.stats.decode_ms > 0 for output in result.outputs)
    ids = {token_id for one in results["child"] for output in one.outputs for token_id in output.token_ids}
    assert len(ids) >= 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_of_a_session_is_the_answer_to_all_tokens_before_it(llms: dict[str, LLM], kind: str) -> None:
    llm = llms[kind]
    greedy, seeded = STREAMS["greedy"], STREAMS["seeded"]
    with llm.session() as session:
        results = [
            session.generate([5, 6, 7], greedy),
            session.generate("river bank"),
            session.generate([9], seeded),
        ]
    context: tuple[int, ...] = ()
    inputs = [(5, 6, 7), tuple(llm.tokenize("river bank", add_special_tokens=False)), (9,)]
    for result, given, params in zip(results, inputs, (greedy, greedy, seeded), strict=True):
        assert result.prompt_token_ids == context + given
        [whole] = llm.generate([list(result.prompt_token_ids)], params, progress=False)
        assert (result.text, result.outputs[0].token_ids) == (whole.text, whole.outputs[0].token_ids)
        assert result.outputs[0].finish_reason == "length"
        context = result.prompt_token_ids + result.outputs[0].token_ids


@pytest.mark.parametrize("kind", ["remote", "in-process"])
def test_a_session_ends_with_the_first_error_or_when_it_is_closed(llms: dict[str, LLM], kind: str) -> None:
    with llms[kind].session() as session:
        session.generate([5], STREAMS["no text"])
        for _ in range(2):
            with pytest.raises(InvalidArgument, match=r"append\.token_ids"):
                session.generate([1 << 20])
    session = llms[kind].session()
    session.close()
    with pytest.raises(ServiceError, match="the session has ended"):
        session.generate([5])


def test_the_most_logprobs_are_those_of_the_engine(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=30, ignore_eos=True)
    with LLM(checkpoint, engine="in-process", max_logprobs=40, **OPTIONS) as llm:
        logprobs = llm.generate("river bank", params, progress=False)[0].outputs[0].logprobs or ()
    assert [len(logprob.top) for logprob in logprobs] == [30, 30]


def test_the_transports_cut_at_the_same_stop_string(llms: dict[str, LLM]) -> None:
    whole = llms["in-process"].generate("river bank", STREAMS["greedy"], progress=False)[0]
    stop = whole.text[8:11]
    params = dataclasses.replace(STREAMS["greedy"], stop=stop)
    results = [llms[kind].generate("river bank", params, progress=False)[0] for kind in KINDS]
    for result in results:
        output = result.outputs[0]
        assert (output.finish_reason, output.stop) == ("stop", stop)
        assert output.text == whole.text[: whole.text.index(stop)]
        ids = list(output.token_ids)
        assert ids == list(whole.outputs[0].token_ids[: len(ids)])
        # Up to the token that completes the stop string, and none behind it.
        text_of = llms["in-process"].detokenize
        assert stop in text_of(ids)
        assert stop not in text_of(ids[:-1])
    assert len({tuple(result.outputs[0].token_ids) for result in results}) == 1


def test_a_result_has_everything_about_its_prompt(llms: dict[str, LLM]) -> None:
    for kind in KINDS:
        result = llms[kind].generate("river bank", STREAMS["logprobs"], progress=False)[0]
        assert result.prompt == "river bank"
        assert list(result.prompt_token_ids) == llms[kind].tokenize("river bank")
        assert result.usage.num_prompt_tokens == len(result.prompt_token_ids)
        assert result.usage.num_completion_tokens == 5
        first, *others = result.prompt_logprobs or ()
        assert first.logprob is None
        assert all(logprob.logprob is not None and logprob.logprob < 0 for logprob in others)
        output = result.outputs[0]
        logprobs = output.logprobs or ()
        assert [logprob.token_id for logprob in logprobs] == list(output.token_ids)
        assert all(logprob.rank == 1 and len(logprob.top) == 3 for logprob in logprobs)
        assert output.cumulative_logprob == pytest.approx(sum(logprob.logprob or 0.0 for logprob in logprobs))
        assert "".join(logprob.text for logprob in logprobs) == output.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_without_alternatives_has_none_beside_one_with_them(
    llms: dict[str, LLM], kind: str
) -> None:
    none, five = (
        SamplingParams(temperature=0.0, max_tokens=length, logprobs=count, ignore_eos=True)
        for length, count in ((8, 0), (3, 5))
    )
    alone = llms[kind].generate([[5, 6, 7]], none, progress=False)[0].outputs[0]
    together = llms[kind].generate([[5, 6, 7], [8, 9, 10]], [none, five], progress=False)
    assert alone.logprobs == together[0].outputs[0].logprobs
    assert [len(logprob.top) for logprob in alone.logprobs or ()] == [0] * 8
    assert [len(logprob.top) for logprob in together[1].outputs[0].logprobs or ()] == [5] * 3


# Row 116.
def test_an_engine_returns_the_kind_of_logprobs_that_it_was_started_with(llms, checkpoint):
    one = SamplingParams(temperature=1.0, top_k=1, seed=3, max_tokens=6, logprobs=2, ignore_eos=True)
    outputs = {"raw_logprobs": llms["in-process"].generate("river bank", one, progress=False)[0].outputs[0]}
    for mode in ("processed_logprobs", "raw_logits", "processed_logits"):
        with LLM(checkpoint, engine="in-process", logprobs_mode=mode, **OPTIONS) as llm:
            outputs[mode] = llm.generate("river bank", one, progress=False)[0].outputs[0]
    assert len({output.token_ids for output in outputs.values()}) == 1
    values = {
        mode: [logprob.logprob for logprob in output.logprobs or ()] for mode, output in outputs.items()
    }
    # All but the likeliest token are cut away.
    assert values["processed_logprobs"] == [0.0] * 6
    assert all(value is not None and value < 0.0 for value in values["raw_logprobs"])
    assert values["raw_logits"] == values["processed_logits"] != values["raw_logprobs"]
    assert all(value is not None and value > 0.0 for value in values["raw_logits"])


# B-19.
def test_rules_that_leave_no_token_end_their_request_alone_however_often(llms: dict[str, LLM]) -> None:
    llm = llms["child"]
    barred = SamplingParams(
        n=2, temperature=1.0, seed=1, max_tokens=8, min_tokens=4, allowed_token_ids=[9], stop_token_ids=[9]
    )
    end = ("error", (), "the request's own rules leave no token to choose: allowed_token_ids, min_tokens")
    for _ in range(4):
        for result in llm.generate([[5, 6, 7, 8]] * 3, barred, progress=False):
            ends = [(each.finish_reason, each.token_ids, each.error_message) for each in result.outputs]
            assert ends == [end] * 2
    assert len(llm.generate([[5, 6, 7, 8]], STREAMS["greedy"], progress=False)[0].outputs[0].token_ids) == 40


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_in_the_order_of_the_prompts_whichever_ends_first(
    llms: dict[str, LLM], kind: str
) -> None:
    prompts = [[5 + index, 6, 7] for index in range(60)]
    lengths = [40 - 13 * index % 37 for index in range(60)]
    params = [SamplingParams(temperature=0.0, max_tokens=length) for length in lengths]
    results = llms[kind].generate(prompts, params, progress=False)
    assert [list(result.prompt_token_ids) for result in results] == prompts
    assert [len(result.outputs[0].token_ids) for result in results] == lengths


@pytest.mark.parametrize("kind", KINDS)
def test_one_bad_prompt_among_many_is_named_and_the_others_can_be_asked_again(llms, kind):
    prompts: list = [[5, 6]] * 9
    prompts[4] = [5, 512]
    with pytest.raises(InvalidArgument, match=r"prompts\[4\] has the token id 512, must be in 0\.\.511"):
        llms[kind].generate(prompts, progress=False)
    prompts[4] = [5] * 512
    with pytest.raises(InvalidArgument, match=r"prompts\[4\] has 512 tokens, the model takes 511"):
        llms[kind].generate(prompts, progress=False)
    prompts[4] = [5, 7]
    assert len(llms[kind].generate(prompts, SamplingParams(max_tokens=1), progress=False)) == 9


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_parameter_is_reported_with_its_field(llms: dict[str, LLM], kind: str) -> None:
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, n=100)]
    with pytest.raises(InvalidArgument, match=r"prompts\[1\].*sampling.n is 100"):
        llms[kind].generate([[5], [6]], params, progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_adapter_is_not_found(llms: dict[str, LLM], kind: str) -> None:
    with pytest.raises(NotFound, match="adapter 'mine'"):
        llms[kind].generate("river", adapters="mine", progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_generating_model_cannot_do_is_refused_with_what_it_can(llms, kind):
    llm = llms[kind]
    for task, call in {
        "embed": lambda: llm.embed("a"),
        "token_embed": lambda: llm.encode("a"),
        "classify": lambda: llm.classify("a"),
        "score": lambda: llm.score("a", "b"),
    }.items():
        with pytest.raises(FailedPrecondition, match=f"does not support {task}; it supports: generate"):
            call()


@pytest.mark.parametrize("kind", KINDS)
def test_text_becomes_tokens_and_back(llms: dict[str, LLM], kind: str) -> None:
    token_ids = llms[kind].tokenize("the old stone bridge")
    assert len(token_ids) > 1
    assert llms[kind].detokenize(token_ids) == "the old stone bridge"


@pytest.mark.parametrize("kind", KINDS)
def test_more_prompts_than_fit_at_once_are_all_answered(llms: dict[str, LLM], kind: str) -> None:
    # More than are in flight.
    prompts = [[index % 500, index // 500] for index in range(MAX_IN_FLIGHT + 50)]
    results = llms[kind].generate(prompts, SamplingParams(temperature=0.0, max_tokens=2), progress=False)
    assert [list(result.prompt_token_ids) for result in results] == prompts


def test_an_engine_that_is_killed_raises_in_every_call_then_and_after(checkpoint: Path) -> None:
    others = _children()
    with LLM(checkpoint, engine="child", **OPTIONS) as llm:
        own = _children() - others
        raised: list[BaseException] = []

        def ask() -> None:
            try:
                llm.generate([[5, 6]] * 50, SamplingParams(max_tokens=500), progress=False)
            except EngineDead as error:
                raised.append(error)

        callers = [threading.Thread(target=ask) for _ in range(2)]
        for caller in callers:
            caller.start()
        llm.generate([[5]], SamplingParams(max_tokens=3), progress=False)
        for pid in own:
            os.kill(pid, signal.SIGKILL)
        for caller in callers:
            caller.join(30)
        assert len(raised) == 2
        assert all("SIGKILL" in str(error) for error in raised)
        with pytest.raises(EngineDead, match="SIGKILL"):
            llm.generate([[5]], progress=False)
        with pytest.raises(EngineDead, match="SIGKILL"):
            llm.tokenize("river")


@pytest.mark.parametrize("kind", ["in-process", "child"])
def test_closing_leaves_no_thread_no_process_and_no_descriptor(checkpoint: Path, kind: str) -> None:
    def use() -> None:
        with LLM(checkpoint, engine=kind, **OPTIONS) as llm:
            llm.generate(PROMPTS, SamplingParams(max_tokens=3), progress=False)
        llm.close()

    # What is made once and kept by libraries is no leak.
    use()
    threads, children, descriptors = set(threading.enumerate()), _children(), _descriptors()
    use()
    for thread in set(threading.enumerate()) - threads:
        # What only waited for the process that is gone now may still be on its way out.
        thread.join(10)
        assert not thread.is_alive(), thread
    assert _children() == children
    ended_by = time.monotonic() + 30
    # gRPC closes its sockets in threads of its own, without an event.
    while _descriptors() > descriptors and time.monotonic() < ended_by:
        time.sleep(0.01)
    assert _descriptors() <= descriptors


def test_a_request_that_takes_too_long_is_ended(checkpoint: Path) -> None:
    # Nothing is awaited for the facts of the model, which are read first.
    with (
        LLM(checkpoint, timeout_s=1e-6, **OPTIONS) as llm,
        pytest.raises(DeadlineExceeded, match="timeout_s"),
    ):
        llm.generate([5, 6], SamplingParams(max_tokens=50), progress=False)


def test_an_engine_in_this_process_needs_no_sockets(checkpoint: Path) -> None:
    before = _sockets()
    with LLM(checkpoint, **OPTIONS) as llm:
        llm.generate([5, 6], SamplingParams(max_tokens=3), progress=False)
        # Pairs of an event loop and of its text workers have no address.
        assert not (_sockets() - before) & _sockets_with_an_address()


def test_a_closed_facade_refuses_calls(checkpoint: Path) -> None:
    llm = LLM(checkpoint, **OPTIONS)
    llm.close()
    with pytest.raises(ServiceError, match="closed"):
        llm.tokenize("river")


@pytest.mark.parametrize("kind", ["in-process", "child"])
def test_a_model_that_cannot_be_loaded_is_a_readable_error(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Nothing"], "model_type": "nothing"}')
    (tmp_path / "model.safetensors").symlink_to(embedded_model() / "model.safetensors")
    with pytest.raises(ModelError, match="model type `nothing`"):
        LLM(tmp_path, engine=kind, **OPTIONS)


@pytest.mark.parametrize("kind", ["in-process", "child"])
def test_a_model_without_safetensors_raises_what_a_missing_folder_raises(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(embedded_model() / name, folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError) as missing:
        LLM(tmp_path / "missing", engine=kind, **OPTIONS)
    with pytest.raises(type(missing.value), match=r"pytorch_model\.bin.*safetensors") as raised:
        LLM(folder, engine=kind, **OPTIONS)
    assert type(raised.value) is type(missing.value)


def test_the_package_offers_the_facade_and_one_module_of_exceptions() -> None:
    offered = (triptych.LLM, triptych.SamplingParams, triptych.errors.EngineDead)
    assert offered == (LLM, SamplingParams, EngineDead)
    assert {"LLM", "SamplingParams"} <= set(dir(triptych))
    with pytest.raises(AttributeError, match="'StructuredOutputsParams': it is StructuredOutput here"):
        _ = triptych.StructuredOutputsParams
    with pytest.raises(AttributeError, match=r"'Sampling': there are LLM, .*SamplingParams"):
        _ = triptych.Sampling


ARGUMENTS_OF_VLLM = (
    "logits_processors", "skip_tokenizer_init", "tokenization_kwargs", "swap_space",
    "trust_remote_code", "fully_sharded_loras", "tokenizer_mode", "compilation_config",
)  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS_OF_VLLM)
def test_an_argument_of_vllm_that_is_not_served_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(TypeError, match=f"LLM takes no argument {name}: .{{10}}"):
        LLM("folder", **{name: True})


@pytest.mark.parametrize("method", [LLM.generate, LLM.chat])
def test_vllms_name_for_the_bar_is_answered_with_that_of_today(method: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="takes no argument use_tqdm: it is progress=False"):
        method(None, ["hi"], use_tqdm=False)


def test_a_misspelt_argument_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match="argument max_num_seq; did you mean max_num_seqs"):
        LLM("folder", max_num_seq=3)
    with pytest.raises(TypeError, match="argument temprature; did you mean temperature"):
        SamplingParams(**{"temprature": 1})


def test_all_unknown_arguments_are_in_one_error_in_words_of_python() -> None:
    arguments = {
        "enforce_eager": True,
        "swap_space": 4,
        "disable_log_stats": True,
        "api_server_count": 2,
        "max_num_seq": 3,
    }
    with pytest.raises(TypeError) as caught:
        LLM("folder", **arguments)
    assert str(caught.value).splitlines() == [
        "LLM takes none of these arguments:",
        "  enforce_eager: it is cuda_graphs=False",
        "  swap_space: weights and KV cache stay on the device, nothing is offloaded",
        "  disable_log_stats: statistics are not logged: triptych admin ADDRESS status",
        "  api_server_count: it is --workers of `triptych frontend`",
        "  max_num_seq; did you mean max_num_seqs?",
    ]
    with pytest.raises(TypeError, match="argument json: it is json_schema"):
        StructuredOutput(**{"json": "{}"})
    with pytest.raises(TypeError, match=r"argument structured_outputs: it is structured_output=Struc"):
        SamplingParams(**{"structured_outputs": None})


def test_attributes_of_vllm_are_explained() -> None:
    llm = LLM.__new__(LLM)
    output = Completion(0, "", (), None, None, "stop", None)
    result = RequestResult("", None, (), (output,), 0, None, Usage(0, 0, 0))
    for one, name, hint in (
        (llm, "get_tokenizer", ": texts and ids are converted by tokenize"),
        (llm, "beam_search", ": there is no beam search"),
        (llm, "get_default_sampling_params", r": it is default_sampling_params\(\)"),
        (llm, "max_model_length", r"; did you mean max_model_len\?"),
        (result, "finished", ": a result is always complete"),
        (output, "stop_reason", ": it is stop, "),
        (output, "_private", "$"),
    ):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'{hint}"):
            getattr(one, name)
    assert copy.deepcopy(result) == pickle.loads(pickle.dumps(result)) == result


def test_options_are_those_of_the_engine_and_checked_at_once() -> None:
    with pytest.raises(InvalidArgument, match="block-size is 0"):
        LLM("folder", block_size=0)
    for options, message in (
        ({"quantization": "gptq"}, "'gptq' is not one of .*; quantized checkpoints are not read"),
        ({"dtype": "floaty"}, "dtype: 'floaty' is not one of auto, float32"),
        ({"max_num_seqs": 2.5}, "max_num_seqs: 2.5 is not a whole number"),
        ({"max_model_len": True}, "max_model_len: True is not a whole number"),
        ({"kv_cache_memory": "2 apples"}, "kv_cache_memory: '2 apples' is not a size such as"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            LLM("folder", **options)


@pytest.mark.parametrize(
    "arguments",
    [
        {"engine": "elsewhere"},
        {"engine": "remote"},
        {"engine": "child", "address": "127.0.0.1:1"},
        {"engine": "remote", "address": "127.0.0.1:1", "block_size": 16},
        {"engine": "remote", "address": "127.0.0.1:1", "tokenizer": "file"},
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: dict) -> None:
    with pytest.raises(InvalidArgument):
        LLM("folder", **arguments)


def test_an_unreachable_frontend_is_reported_in_time() -> None:
    with pytest.raises(Unavailable, match="no frontend was reached"):
        LLM("", engine="remote", address="127.0.0.1:1", start_timeout_s=0.2)


def test_a_conversation_has_the_same_answer_by_every_transport(llms: dict[str, LLM]) -> None:
    conversation = [{"role": "user", "content": "the quick brown fox"}]
    results = [llms[kind].chat(conversation, STREAMS["greedy"], progress=False)[0] for kind in KINDS]
    assert _comparable(results) == _comparable([results[0]] * 3)
    assert len(set(results[0].outputs[0].token_ids)) >= 10
    assert "the quick brown fox" in llms["remote"].detokenize(results[0].prompt_token_ids)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _sockets() -> set[str]:
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(descriptor.readlink()))
        except FileNotFoundError:
            continue  # That of the listing itself.
    return {link for link in links if link.startswith("socket:")}


def _sockets_with_an_address() -> set[str]:
    tcp = [Path(f"/proc/self/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    unix = Path("/proc/self/net/unix").read_text().splitlines()[1:]
    inodes = [line.split()[9] for lines in tcp for line in lines]
    inodes += [fields[6] for fields in map(str.split, unix) if len(fields) > 7]
    return {f"socket:[{inode}]" for inode in inodes}


# What the facade sends and how it reads the answers, against a frontend of fakes.


def test_the_models_defaults_are_reported() -> None:
    with fake_frontend() as (_, address), LLM("", engine="remote", address=address) as llm:
        assert llm.default_sampling_params() == SamplingParams(temperature=0.5, top_k=7)
        assert llm.model == "only"


def test_parameters_adapters_and_priorities_go_with_their_prompt() -> None:
    with fake_frontend() as (frontend, address), LLM("mine", engine="remote", address=address) as llm:
        llm.generate(
            [[1], [2], [3]],
            [SamplingParams(max_tokens=number) for number in (4, 5, 6)],
            adapters=["a", None, "c"],
            priorities=[-1, 0, 1],
            progress=False,
        )
    asked = sorted(frontend.requests, key=lambda request: request.token_ids.ids[0])
    assert [request.sampling.max_tokens for request in asked] == [4, 5, 6]
    assert [request.adapter for request in asked] == ["a", "", "c"]
    assert [request.priority for request in asked] == [-1, 0, 1]
    assert {request.model for request in asked} == {"mine"}
    assert len({request.request_id for request in asked}) == 3


@pytest.mark.parametrize("field", ["sampling_params", "adapters", "priorities"])
def test_lists_of_another_length_than_the_prompts_are_refused(field: str) -> None:
    one = {"sampling_params": SamplingParams(), "adapters": "a", "priorities": 1}[field]
    with (
        fake_frontend() as (frontend, address),
        LLM("", engine="remote", address=address) as llm,
        pytest.raises(InvalidArgument, match=f"{field} has 3 entries for 2 prompts"),
    ):
        llm.generate([[1], [2]], **{field: [one] * 3}, progress=False)
    assert frontend.requests == []


@pytest.mark.parametrize(
    "bad",
    ["", [], [1, VOCAB_SIZE], [-1], [1.5], "x" * 40, {"prompt": "a", "prompt_token_ids": [1]}, None, [True]],
)
def test_nothing_is_sent_where_one_prompt_is_wrong(bad: object) -> None:
    with (
        fake_frontend() as (frontend, address),
        LLM("", engine="remote", address=address) as llm,
        pytest.raises(InvalidArgument, match=r"prompts\[2\]"),
    ):
        llm.generate(["ab", [1], bad, "cd"], progress=False)
    assert frontend.requests == []


def test_a_full_server_is_asked_again() -> None:
    with fake_frontend() as (frontend, address), LLM("", engine="remote", address=address) as llm:
        frontend.num_refusals = 20
        results = llm.generate([[number] for number in range(1, 9)], progress=False)
    assert [result.outputs[0].token_ids for result in results] == [(number,) for number in range(1, 9)]


def test_the_first_refusal_ends_the_others() -> None:
    with fake_frontend() as (frontend, address), LLM("", engine="remote", address=address) as llm:
        frontend.hangs_on = 1
        # Beyond the server's limit, which may be another where it is configured so.
        params = [SamplingParams(), SamplingParams(n=100)]
        with pytest.raises(InvalidArgument, match=r"prompts\[1\]: n is 100"):
            llm.generate([[1], [2]], params, progress=False)
        assert frontend.was_cancelled.wait(10)


def test_ctrl_c_aborts_what_runs_and_the_facade_goes_on() -> None:
    with fake_frontend() as (frontend, address), LLM("", engine="remote", address=address) as llm:
        frontend.hangs_on = 1
        frontend.on_hang = lambda: os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2]], progress=False)
        assert frontend.was_cancelled.wait(10)
        assert llm.generate([[3]], progress=False)[0].outputs[0].token_ids == (3,)


def test_one_conversation_or_several_become_chat_requests() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    with fake_frontend() as (frontend, address), LLM("", engine="remote", address=address) as llm:
        one = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        single = llm.chat(one, tools=tools, tool_choice="required", progress=False)
        several = llm.chat([one, parts], template_arguments={"depth": 2}, progress=False)
    assert [result.text for result in single] == ["be brief hello"]
    assert [result.text for result in several] == ["be brief hello", "a b"]
    output = single[0].outputs[0]
    assert (output.reasoning, output.finish_reason) == ("because", "stop")
    assert [(call.id, call.name, call.arguments) for call in output.tool_calls] == [("1", "look", "{}")]
    assert frontend.requests[0].tools[0].parameters_json_schema == '{"type": "object"}'
    assert frontend.requests[1].template_options.arguments_json == '{"depth": 2}'


@pytest.mark.parametrize(
    ("conversations", "logprob"),
    [
        ([[{"role": "user", "content": "a"}], []], r"conversations\[1\]"),
        ([[{"role": "king", "content": "a"}]], r"conversations\[0\]\[0\]\.role"),
        ([[{"role": "user", "content": 5}]], r"conversations\[0\]\[0\]\.content"),
        ([[{"role": "user", "content": [{"type": "image_url"}]}]], r"content\[0\]"),
        ([[{"role": "user", "contents": "a"}]], "contents"),
    ],
)
def test_a_conversation_that_is_none_is_named(conversations: list, logprob: str) -> None:
    with (
        fake_frontend() as (frontend, address),
        LLM("", engine="remote", address=address) as llm,
        pytest.raises(InvalidArgument, match=logprob),
    ):
        llm.chat(conversations, progress=False)
    assert frontend.requests == []


def test_pooling_goes_to_the_embedding_service_where_the_model_can() -> None:
    tasks = ("embed", "token_embed", "classify", "score")
    with fake_frontend(*tasks) as (frontend, address), LLM("", engine="remote", address=address) as llm:
        assert [
            result.values for result in llm.embed(["ab", "abc"], dimensions=2, truncate_prompt_tokens=-1)
        ] == [
            [2.0, 0.5],
            [3.0, 0.5],
        ]
        assert [result.values for result in llm.encode("ab", truncate_prompt_tokens=5)] == [
            [[1.0, 2.0], [3.0, 4.0]]
        ]
        (classes,) = llm.classify("ab", use_activation=False, truncate_prompt_tokens=7)
        assert (classes.values, classes.labels) == ([0.25, 0.75], ("no", "yes"))
        assert [
            result.score
            for result in llm.score("q", ["d", "dd"], use_activation=True, truncate_prompt_tokens=9)
        ] == [
            1.0,
            2.0,
        ]
        with pytest.raises(InvalidArgument, match="queries has 2 entries"):
            llm.score(["q", "r"], ["d"])
    assert frontend.requests[0].pooling.dimensions == 2
    assert [request.use_activation for request in frontend.requests[-2:]] == [False, True]
    assert [request.truncate_prompt_tokens for request in frontend.requests] == [-1, 5, 7, 9]


# What a stream's messages look like is nothing for a facade that returns whole results.
OF_STREAMS = {"output_kind", "stream_interval"}


def test_every_parameter_of_the_contract_has_its_field_of_the_same_name() -> None:
    ours = {field.name for field in dataclasses.fields(SamplingParams)}
    assert ours == set(sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name) - OF_STREAMS


def test_what_is_not_given_is_unset() -> None:
    assert SamplingParams().to_proto() == sampling_pb2.SamplingParams()


@pytest.mark.parametrize("name", ["temperature", "top_k", "seed", "min_tokens", "logprobs", "detokenize"])
def test_a_zero_that_is_given_is_set(name: str) -> None:
    message = SamplingParams(**{name: 0}).to_proto()
    assert message.HasField(name)


def test_all_kinds_of_values_arrive() -> None:
    message = SamplingParams(
        temperature=0.5,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        logit_bias={5: -1.0, 6: 2.0},
        structured_output=StructuredOutput(choice=["yes", "no"]),
        repetition_detection=RepetitionDetection(max_pattern_size=4, min_count=3),
    ).to_proto()
    assert message == sampling_pb2.SamplingParams(
        temperature=0.5,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        logit_bias=[
            sampling_pb2.LogitBias(token_id=5, bias=-1.0),
            sampling_pb2.LogitBias(token_id=6, bias=2.0),
        ],
        structured_output=sampling_pb2.StructuredOutput(
            choice=sampling_pb2.StructuredChoice(choices=["yes", "no"])
        ),
        repetition_detection=sampling_pb2.RepetitionDetection(max_pattern_size=4, min_count=3),
    )


def test_one_stop_string_needs_no_list() -> None:
    assert SamplingParams(stop="end").to_proto().stop == ["end"]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": -1}, "temperature is -1.0, must be finite and in 0..2"),
        ({"top_p": 0.0}, "top_p is 0.0, must be above 0 and at most 1"),
        ({"n": 2, "temperature": 0}, "n is 2, must be 1 where temperature is 0"),
        ({"presence_penalty": 3}, "presence_penalty is 3.0, must be in -2..2"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens is 3, must be at most 2, the limit of the output"),
        ({"bad_words": [""]}, "bad_words[0] has 0 characters"),
        ({"thinking_token_budget": -5}, "thinking_token_budget is -5"),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_constructor(parameters: dict, message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)) as raised:
        SamplingParams(**parameters)
    assert raised.value.violations[0][0] in parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("max_tokens", 1.5),
        ("seed", -1),
        ("stop_token_ids", ["a"]),
        ("logit_bias", [5]),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name} is") as raised:
        SamplingParams(**{name: value})
    assert raised.value.violations[0][0] == name


@pytest.mark.parametrize("value", [True, False, 5.0, 5.5, "5"])
@pytest.mark.parametrize("name", ["thinking_token_budget", "max_tokens", "n"])
def test_127_a_budget_is_a_whole_number_and_neither_a_truth_value_nor_a_float(name, value):
    with pytest.raises(InvalidArgument, match=f"^{name} is {value!r}"):
        SamplingParams(**{name: value})


def test_127_a_truth_value_is_no_number_and_a_number_no_truth_value() -> None:
    for name, value in (("temperature", True), ("stop_token_ids", [True]), ("logit_bias", {True: 1.0})):
        with pytest.raises(InvalidArgument, match=f"^{name} is"):
            SamplingParams(**{name: value})
    assert SamplingParams(ignore_eos=True, detokenize=False).to_proto().ignore_eos


def test_defaults_of_a_model_come_back_as_parameters() -> None:
    params = SamplingParams(temperature=0.5, top_k=20, max_tokens=7)
    assert from_proto(params.to_proto()) == params


def test_a_second_start_reads_the_weights_that_the_first_one_packed(checkpoint: Path, tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(checkpoint, folder)
    # As many weights as it takes to be worth a file.
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "head_dim": 64}
    config = LlamaConfig.from_pretrained(folder, **sizes, num_attention_heads=8, num_key_value_heads=2)
    LlamaForCausalLM(config).save_pretrained(folder)
    greedy, answers, files = SamplingParams(temperature=0.0, max_tokens=20), [], []
    for engine in ("child", "in-process"):
        with LLM(folder, engine=engine, packed_weights_cache=str(cache), **OPTIONS) as llm:
            answers.append([result.outputs[0].token_ids for result in llm.generate(PROMPTS, greedy)])
        (path,) = cache.iterdir()
        files.append(path.stat())
        os.utime(path, (1, 1))
    assert answers[0] == answers[1]
    # Used again, and not written again.
    assert files[1].st_mtime > 1
    assert files[0].st_ino == files[1].st_ino


def _shown(*, is_shown: bool) -> str:
    out = io.StringIO()
    with Bar("Generating", 3, is_shown=is_shown, console=Console(file=out, width=200)) as bar:
        for _ in range(3):
            bar.tick(10, 20)
    return out.getvalue()


def test_the_bar_shows_prompts_done_and_tokens_per_second() -> None:
    text = _shown(is_shown=True)
    assert "Generating" in text
    assert "3/3" in text
    assert "tokens/s in" in text
    assert "tokens/s out" in text


def test_a_bar_that_is_not_wanted_writes_nothing() -> None:
    assert _shown(is_shown=False) == ""
