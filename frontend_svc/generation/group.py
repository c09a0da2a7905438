"""Creates the request states of a sampling group, with their shared collector and the options' readers."""

from __future__ import annotations

from collections.abc import Callable

from frontend_svc.generation.preprocess import Prepared, has_text
from frontend_svc.options import OPTIONS
from frontend_svc.options.option import AnyRequest
from frontend_svc.output.collector import Collector, OutputKind, ReaderLimit
from frontend_svc.output.request_state import RequestState
from frontend_svc.text.prompt import Prompt
from frontend_svc.text.stop_strings import StopBuffer
from triptych.api.v1 import chat_message_pb2


def make_states(
    request: AnyRequest,
    source: Prompt,
    prepared: Prepared,
    kind: OutputKind,
    *,
    stream_interval: int,
    limit: ReaderLimit,
    on_slow: Callable[[], None],
) -> list[RequestState]:
    """One state for each output of `prepared`, set up for what `request` asks for; `source` is its prompt."""
    n, prompt, sampling = len(prepared.entries), prepared.prompt, request.sampling
    readers = [
        [reader for option in OPTIONS if (reader := option.reader(request, prompt, index)) is not None]
        for index in range(n)
    ]
    collector = Collector(
        kind,
        n,
        stream_interval=stream_interval,
        limit=limit,
        on_slow=on_slow,
        awaits_first=any(reader.is_awaited for reader in readers[0]),
    )
    skips_special = sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True
    has_spaces = (
        not sampling.HasField("spaces_between_special_tokens") or sampling.spaces_between_special_tokens
    )
    include = sampling.include_stop_in_output
    stops_in_content = isinstance(request, chat_message_pb2.ChatRequest) and not request.stop_in_all_text
    states = []
    for index in range(n):
        detokenizer = None
        if has_text(sampling):
            detokenizer = prompt.model.tokenizer.detokenizer(
                prompt.context_ids,
                skip_special_tokens=skips_special,
                spaces_between_special_tokens=has_spaces,
                markers=source.markers,
            )
        states.append(
            RequestState(
                collector,
                detokenizer,
                StopBuffer(sampling.stop, include=include) if sampling.stop else None,
                include_stop=include,
                min_tokens=sampling.min_tokens,
                parser=source.parser(streams=kind is OutputKind.DELTA),
                stops_in_content=stops_in_content,
                index=index,
                logprobs=next(
                    filter(None, (option.token_reader(request, prompt) for option in OPTIONS)), None
                ),
                readers=readers[index],
            )
        )
    return states
