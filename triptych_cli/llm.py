"""`LLM`: blocking inference with an engine in this process, in a child process, or behind a frontend."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine_svc.config import EngineConfig
from triptych.api.v1 import chat_message_pb2, chat_pb2, embedding_pb2, generate_pb2, inference_pb2, model_pb2
from triptych.common.v1 import sampling_pb2
from triptych_cli.engines.factory import make_engine_client
from triptych_cli.engines.loop_thread import LoopThread
from triptych_cli.engines.own_engine import EngineDead
from triptych_cli.offline.calls import LLMCalls
from triptych_cli.offline.frontend import LLMFrontend, LocalFrontend, RemoteFrontend
from triptych_cli.offline.inputs import (
    GivenPrompt,
    Message,
    Prompt,
    per_prompt,
    pooling_input,
    read_conversations,
    read_prompts,
    read_tool_choice,
    read_tools,
)
from triptych_cli.offline.params import RepetitionDetection, SamplingParams, StructuredOutput, from_proto
from triptych_cli.offline.results import (
    ClassificationResult,
    EmbeddingResult,
    RequestResult,
    ScoreResult,
    to_chat_result,
    to_result,
    values_of,
)
from triptych_cli.offline.session import Session
from triptych_cli.vllm_names import (
    LLM_ATTRIBUTES,
    check_arguments,
    checks_arguments,
    with_attribute_hints,
)
from triptych_kit.config import typed_values
from triptych_kit.errors import Cancelled, FailedPrecondition, InvalidArgument, Unavailable

__all__ = [
    "LLM",
    "EngineDead",
    "EngineKind",
    "RepetitionDetection",
    "RequestResult",
    "SamplingParams",
    "StructuredOutput",
]

_T = TypeVar("_T")

EngineKind = Literal["in-process", "child", "remote"]

_DEATH_REASON_WAIT_S = 1.0


@with_attribute_hints(**LLM_ATTRIBUTES)
class LLM:
    """Answers prompts in batches. Complete results are returned in the order of the prompts.

    Methods may be called from any thread. An invalid prompt raises a ServiceError with its index before
    anything is sent. If the engine dies, running and later calls raise EngineDead.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        engine: EngineKind = "in-process",
        address: str | None = None,
        tokenizer: str | None = None,
        timeout_s: float | None = None,
        start_timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        """Load `model`, a folder or a hub name, or connect to the frontend at `address` that serves it.

        `options` are fields of `EngineConfig`, for a local engine. `timeout_s` limits each request. With
        `remote`, an empty `model` means the only one that is served.
        """
        check_arguments("LLM", options, [field.name for field in dataclasses.fields(EngineConfig)])
        _check_kind(engine, address, options, tokenizer)
        make: Callable[[], LLMFrontend]
        if address is not None:
            make = partial(RemoteFrontend, address, start_timeout_s=start_timeout_s)
        else:
            make = partial(
                _local_frontend,
                _engine_config(str(model), options),
                is_multiprocess=engine == "child",
                tokenizer=tokenizer,
                start_timeout_s=start_timeout_s,
            )
        self._thread = LoopThread("llm")
        self._frontend: LLMFrontend | None = None
        self._running: set[asyncio.Future[Any]] = set()
        served_name = str(model) if engine == "remote" else ""
        try:
            self._calls: LLMCalls = self._thread.call(self._start(make, served_name, timeout_s))
            self._described: model_pb2.Model = self._run(self._calls.describe())
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"LLM(model={self.model!r}, max_model_len={self.max_model_len})"

    @property
    def model(self) -> str:
        """The served name of the model."""
        return self._described.name

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and output together, in tokens."""
        return self._described.max_model_len

    def default_sampling_params(self) -> SamplingParams:
        """The model's defaults, which apply to parameters that a request leaves unset."""
        return from_proto(self._described.default_sampling)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._run(self._calls.tokenize(text, add_special_tokens=add_special_tokens))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._run(self._calls.detokenize(token_ids, skip_special_tokens=skip_special_tokens))

    @checks_arguments
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        adapters: str | Sequence[str | None] | None = None,
        priorities: int | Sequence[int] | None = None,
        add_special_tokens: bool = True,
    ) -> list[RequestResult]:
        """Complete each prompt. Parameters, adapters and priorities: one for all, or a list with one each."""
        inputs = read_prompts(prompts)
        sampling = _sampling(sampling_params, len(inputs))
        names = per_prompt(adapters, len(inputs), "", "adapters")
        ranks = per_prompt(priorities, len(inputs), 0, "priorities")
        token_ids = self._run(self._calls.prompt_ids(inputs, add_special_tokens=add_special_tokens))
        requests = [
            generate_pb2.GenerateRequest(
                token_ids=generate_pb2.TokenIds(ids=ids), sampling=params, adapter=name, priority=priority
            )
            for ids, params, name, priority in zip(token_ids, sampling, names, ranks, strict=True)
        ]
        with Bar("Generating", len(requests), is_shown=progress) as bar:
            responses = self._run(self._calls.generate(requests, partial(_tick, bar)))
        return [to_result(response, one.text) for response, one in zip(responses, inputs, strict=True)]

    @checks_arguments
    def session(self, *, adapter: str = "", priority: int = 0, add_special_tokens: bool = True) -> Session:
        """Turns that each continue all tokens before them, of which an engine computes only what is new.

        add_special_tokens: around the first input, if it is a text.
        """
        request = self._calls.session_request(adapter=adapter, priority=priority)
        request.add_special_tokens = add_special_tokens
        return Session(partial(self._calls.session, self._while_alive), request, self._run)

    @checks_arguments
    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        chat_template: str = "",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        enable_thinking: bool | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        progress: bool = True,
        adapters: str | Sequence[str | None] | None = None,
        priorities: int | Sequence[int] | None = None,
    ) -> list[RequestResult]:
        """Answer each conversation, through the model's chat template."""
        inputs = read_conversations(conversations)
        sampling = _sampling(sampling_params, len(inputs))
        names = per_prompt(adapters, len(inputs), "", "adapters")
        ranks = per_prompt(priorities, len(inputs), 0, "priorities")
        shared = chat_message_pb2.ChatRequest(
            tools=read_tools(tools),
            tool_choice=read_tool_choice(tool_choice),
            parallel_tool_calls=parallel_tool_calls,
            template_options=chat_message_pb2.ChatTemplateOptions(
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                enable_thinking=enable_thinking,
                arguments_json=json.dumps(template_arguments) if template_arguments else "",
            ),
        )
        requests = []
        for messages, params, name, priority in zip(inputs, sampling, names, ranks, strict=True):
            request = chat_message_pb2.ChatRequest(
                messages=messages, sampling=params, adapter=name, priority=priority
            )
            request.MergeFrom(shared)
            requests.append(request)
        with Bar("Answering", len(requests), is_shown=progress) as bar:
            responses = self._run(self._calls.chat(requests, partial(_tick, bar)))
        return [to_chat_result(response) for response in responses]

    @checks_arguments
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingResult]:
        """One vector per prompt. FailedPrecondition if the model does not support it.

        truncate_prompt_tokens: how many are kept, -1: as many as the model takes; None: none is cut.
        """
        return self._embed(prompts, "embed", dimensions, normalize, truncate_prompt_tokens)

    @checks_arguments
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingResult]:
        """One vector per token of each prompt, as `embed`."""
        return self._embed(prompts, "token_embed", dimensions, normalize, truncate_prompt_tokens)

    @checks_arguments
    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationResult]:
        """Class probabilities of each prompt, logits without `use_activation`; None: as the model.

        truncate_prompt_tokens: see `embed`.
        FailedPrecondition if the model has no classes.
        """
        inputs = read_prompts(prompts)
        _check_task(self._described, "classify")
        request = embedding_pb2.ClassifyRequest(
            inputs=map(pooling_input, inputs),
            use_activation=use_activation,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        response: embedding_pb2.ClassifyResponse = self._run(self._calls.pool("Classify", request))
        labels = tuple(response.labels)
        return [
            ClassificationResult(index, values_of(tensor), labels)
            for index, tensor in enumerate(response.results)
        ]

    @checks_arguments
    def score(
        self,
        queries: Prompt | Sequence[Prompt],
        documents: Prompt | Sequence[Prompt],
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoreResult]:
        """The score of each document for its query, or for the only query.

        use_activation: False for logits; None: as the model.  truncate_prompt_tokens: of a pair, see `embed`.
        FailedPrecondition if the model does not support it.
        """
        query_prompts, document_prompts = (
            read_prompts(queries, "queries"),
            read_prompts(documents, "documents"),
        )
        if len(query_prompts) not in (1, len(document_prompts)):
            raise InvalidArgument(
                f"queries has {len(query_prompts)} entries, must have 1 or as many as documents, "
                f"{len(document_prompts)}",
                field="queries",
            )
        _check_task(self._described, "score")
        request = embedding_pb2.ScoreRequest(
            queries=map(pooling_input, query_prompts),
            documents=map(pooling_input, document_prompts),
            use_activation=use_activation,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        response: embedding_pb2.ScoreResponse = self._run(self._calls.pool("Score", request))
        return [ScoreResult(index, score) for index, score in enumerate(response.scores)]

    def close(self) -> None:
        """Cancel running calls; close connections, the engine if it is local, and the thread."""
        if self._thread.is_running:
            try:
                self._thread.call(self._end())
            finally:
                self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        task: str,
        dimensions: int | None,
        normalize: bool | None,
        truncate_prompt_tokens: int | None,
    ) -> list[EmbeddingResult]:
        inputs: list[GivenPrompt] = read_prompts(prompts)
        _check_task(self._described, task)
        request = embedding_pb2.EmbedRequest(
            inputs=map(pooling_input, inputs),
            pooling=sampling_pb2.PoolingParams(
                task=f"POOLING_TASK_{task.upper()}",
                dimensions=dimensions,
                normalize=normalize,
            ),
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        response: embedding_pb2.EmbedResponse = self._run(self._calls.pool("Embed", request))
        return [EmbeddingResult(index, values_of(tensor)) for index, tensor in enumerate(response.embeddings)]

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if not self._thread.is_running:
            work.close()
            raise Cancelled("this LLM is closed")
        return self._thread.call(self._while_alive(work))

    async def _start(
        self, make: Callable[[], LLMFrontend], served_name: str, timeout_s: float | None
    ) -> LLMCalls:
        self._frontend = frontend = make()
        return LLMCalls(frontend, await frontend.start(), served_name, timeout_s=timeout_s)

    async def _while_alive(self, work: Coroutine[Any, Any, _T]) -> _T:
        frontend = self._frontend
        assert frontend is not None, "it is made in the constructor"
        death = frontend.death
        if death.done():
            work.close()
            raise EngineDead(death.result())
        running = asyncio.ensure_future(work)
        self._running.add(running)
        try:
            await asyncio.wait((running, death), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise EngineDead(death.result())
            return running.result()
        except EngineDead:
            raise
        except Unavailable as error:
            # The end of an engine is seen on its stream first; the reason follows.
            await asyncio.wait({death}, timeout=_DEATH_REASON_WAIT_S)
            if death.done():
                raise EngineDead(death.result()) from error
            raise
        finally:
            running.cancel()
            await asyncio.wait({running})
            self._running.discard(running)

    async def _end(self) -> None:
        if self._frontend is not None:
            if not self._frontend.death.done():
                self._frontend.death.set_result("closed")
            if self._running:
                await asyncio.wait(self._running)
            await self._frontend.close()


def _check_kind(
    engine: str, address: str | None, options: Mapping[str, object], tokenizer: str | None
) -> None:
    if engine not in ("in-process", "child", "remote"):
        raise InvalidArgument(
            f"engine is {engine!r}, must be 'in-process', 'child' or 'remote'", field="engine"
        )
    if (engine == "remote") != (address is not None):
        raise InvalidArgument("address is given for engine='remote', and only for it", field="address")
    if engine == "remote" and (options or tokenizer is not None):
        named = ", ".join(sorted(options) or ["tokenizer"])
        raise InvalidArgument(f"{named}: a remote engine has its options already", field=named)


def _engine_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    try:
        # Processes of the engine write to the stderr of a script, which wants to see what is wrong.
        options = {"log_level": "warning", **typed_values(EngineConfig, options)}
        return EngineConfig(model=model, **options)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"engine options: {error}") from error


def _local_frontend(
    config: EngineConfig, *, is_multiprocess: bool, tokenizer: str | None, start_timeout_s: float
) -> LLMFrontend:
    engine = make_engine_client(
        is_async=False, is_multiprocess=is_multiprocess, config=config, start_timeout_s=start_timeout_s
    )
    return LocalFrontend(
        engine, tokenizer=tokenizer, max_logprobs=config.max_logprobs, start_timeout_s=start_timeout_s
    )


def _check_task(model: model_pb2.Model, task: str) -> None:
    """Raise FailedPrecondition with the supported tasks if the model does not support `task`."""
    if task not in model.supported_tasks:
        supported = ", ".join(model.supported_tasks) or "none that is known here"
        raise FailedPrecondition(
            f"model {model.name!r} does not support {task}; it supports: {supported}",
            reason="TASK_NOT_SUPPORTED",
        )


def _sampling(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[sampling_pb2.SamplingParams]:
    params = per_prompt(sampling_params, num_prompts, SamplingParams(), "sampling_params")
    messages = []
    for index, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise InvalidArgument(f"sampling_params[{index}] is {one!r}, must be SamplingParams")
        messages.append(one.to_proto())
    return messages


class Bar:
    """Progress bar on stderr: finished prompts, tokens per second. `tick` may be called from any thread."""

    def __init__(
        self, title: str, num_prompts: int, *, is_shown: bool, console: Console | None = None
    ) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            disable=not (is_shown and num_prompts),
        )
        self._task = self._progress.add_task(title, total=num_prompts, speed="")
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def tick(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """One more prompt is done."""
        self._num_prompt_tokens += num_prompt_tokens
        self._num_output_tokens += num_output_tokens
        elapsed_s = self._progress.tasks[0].elapsed or 0.0
        speed = ""
        if elapsed_s > 0:
            speed = (
                f"{self._num_prompt_tokens / elapsed_s:,.0f} tokens/s in, "
                f"{self._num_output_tokens / elapsed_s:,.0f} tokens/s out"
            )
        self._progress.update(self._task, advance=1, speed=speed)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def _tick(bar: Bar, response: inference_pb2.GenerateUnaryResponse | chat_pb2.ChatUnaryResponse) -> None:
    bar.tick(response.usage.num_prompt_tokens, response.usage.num_completion_tokens)
