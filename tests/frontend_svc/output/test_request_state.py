"""One request's way from token ids to text and end, with real tokens."""

from __future__ import annotations

import asyncio

import pytest

from frontend_svc.output.collector import (
    Collector,
    DraftUse,
    Ending,
    EndReason,
    OutputKind,
    OutputPiece,
    ReaderLimit,
)
from frontend_svc.output.loss import Loss, LossKind
from frontend_svc.output.pooling_state import Pooled, PoolingState
from frontend_svc.output.processor import OutputProcessor, StepColumns
from frontend_svc.output.request_state import RequestState
from frontend_svc.text.detokenizer import Detokenizer
from frontend_svc.text.stop_strings import StopBuffer
from tests.frontend_svc.tokenizers import EOS, byte_level_tokenizer, id_of
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import step_pb2
from triptych_kit.errors import Aborted, Internal, InvalidArgument, Unavailable

TOKENIZER = byte_level_tokenizer()
EOS_ID = id_of(TOKENIZER, EOS)
BYTE = {byte: id_of(TOKENIZER, byte) for byte in "abcdefZ"}
AT_EOS = Ending(EndReason.STOP, eos_token_id=EOS_ID)


def state(
    *stops: str, include: bool = False, min_tokens: int = 0, skip: bool = True, detokenize: bool = True
) -> RequestState:
    collector = Collector(OutputKind.DELTA, stream_interval=1, limit=ReaderLimit(), on_slow=lambda: None)
    detokenizer = Detokenizer(TOKENIZER, [], special_ids=frozenset({EOS_ID}), skip_special_tokens=skip)
    return RequestState(
        collector,
        detokenizer if detokenize else None,
        StopBuffer(stops, include=include) if stops else None,
        include_stop=include,
        min_tokens=min_tokens,
    )


async def run(request: RequestState, *steps: list[int], ending: Ending | None = None) -> OutputPiece:
    for index, ids in enumerate(steps):
        if request.advance(ids, ending if index == len(steps) - 1 else None) is not None:
            break
    (piece,) = (await request.collector.get()).pieces
    return piece


def letters(text: str) -> list[int]:
    return [BYTE[letter] for letter in text]


async def test_stop_string_beats_the_end_in_the_same_step_and_keeps_all_ids():
    for include, text in ((False, "ab"), (True, "abcd")):
        output = await run(state("cd", include=include), [*letters("abcde"), EOS_ID], ending=AT_EOS)
        assert output.text == text
        assert len(output.token_ids) == 6
        assert output.ending == Ending(EndReason.STOP, stop_string="cd")


async def test_the_drafts_of_an_output_are_kept_whatever_ends_it():
    use = DraftUse(4, 2)
    output = await run(state("cd"), letters("abcd"), ending=Ending(EndReason.LENGTH, drafts=use))
    assert output.ending == Ending(EndReason.STOP, stop_string="cd", drafts=use)


async def test_stop_string_across_steps_ends_the_request():
    output = await run(state("cd"), letters("abc"), letters("d"), letters("e"))
    assert (output.text, output.token_ids) == ("ab", letters("abcd"))


async def test_82_first_min_tokens_cannot_complete_a_stop_string():
    ids = TOKENIZER.encode(" is Lee, and I'm a student").ids
    text_of_5 = TOKENIZER.decode(ids[:5])
    output = await run(state("e", min_tokens=5), *[[token_id] for token_id in ids])
    rest = TOKENIZER.decode(ids)[len(text_of_5) :]
    assert output.text == text_of_5 + rest.partition("e")[0]
    assert (await run(state("e"), *[[token_id] for token_id in ids])).text == " is L"


async def test_stop_token_is_not_rendered_but_its_id_is_kept():
    stop_id = BYTE["c"]
    ending = Ending(EndReason.STOP, stop_token_id=stop_id)
    output = await run(state(), letters("abc"), ending=ending)
    assert (output.text, output.token_ids, output.ending) == ("ab", letters("abc"), ending)
    assert (await run(state(include=True), letters("abc"), ending=ending)).text == "abc"


async def test_eos_is_not_rendered_even_when_special_tokens_are_shown():
    ids = [*letters("ab"), EOS_ID]
    assert (await run(state(skip=False), ids, ending=AT_EOS)).text == "ab"
    assert (await run(state(skip=False, include=True), ids, ending=AT_EOS)).text == "ab" + EOS


async def test_length_end_renders_the_last_token_and_flushes_half_a_character():
    half = id_of(TOKENIZER, "æ")
    output = await run(state(), [*letters("ab"), half], ending=Ending(EndReason.LENGTH))
    assert output.text == "ab\ufffd"


async def test_held_back_text_comes_out_at_the_end():
    output = await run(state("bcd"), letters("abc"), ending=Ending(EndReason.LENGTH))
    assert output.text == "abc"


async def test_no_text_without_detokenizing():
    output = await run(state(detokenize=False), letters("ab"), ending=Ending(EndReason.LENGTH))
    assert (output.text, output.token_ids) == ("", letters("ab"))


async def test_all_ids_are_kept_whatever_was_read():
    request = state()
    request.advance(letters("ab"), None)
    await request.collector.get()
    request.advance(letters("c"), None)
    assert (request.output_token_ids.tolist(), request.has_ended) == (letters("abc"), False)
    request.advance([], Ending(EndReason.LENGTH))
    assert request.has_ended


async def test_a_loss_and_a_temporary_refusal_are_reported_and_keep_the_output():
    request, reported = state("bcd"), []
    request.on_lost = lambda cause, error: reported.append((cause, error.reason))
    request.advance(letters("ab"), None)
    request.lose(Loss("engine:1", LossKind.SILENCE, "reset"))
    request.fail(Unavailable("drains", reason="DRAINING"))
    assert reported == [(LossKind.SILENCE, "ENGINE_LOST"), (LossKind.REFUSED, "DRAINING")]
    output = await run(request, letters("cf"), ending=Ending(EndReason.LENGTH))
    assert (output.text, output.token_ids) == ("abcf", letters("abcf"))


async def test_what_no_engine_would_take_ends_it():
    request = state()
    request.on_lost = lambda cause, error: pytest.fail("it is not to be sent on")
    request.fail(InvalidArgument("too long"))
    with pytest.raises(InvalidArgument):
        await request.collector.get()


async def test_what_an_engine_has_begun_goes_on_whatever_another_says():
    request, reported = state(), []
    request.on_lost = lambda cause, error: reported.append((cause, error.reason))
    request.is_continued = True
    request.fail(InvalidArgument("too many", reason="INVALID_REQUEST"))
    assert reported == [(LossKind.REFUSED, "INVALID_REQUEST")]
    assert not request.collector.has_ended


async def test_the_next_output_is_reported_once():
    request, reported = state(), []
    request.on_output = lambda: reported.append(request.num_output_tokens)
    request.advance(letters("ab"), None)
    request.advance(letters("c"), None)
    assert reported == [2]


@pytest.mark.parametrize("reason", list(EndReason))
async def test_an_abort_is_no_output(reason: EndReason):
    seen: list[str] = []
    request = state()
    request.on_output = lambda: seen.append("output")
    request.advance([], None)
    request.advance([], Ending(reason))
    assert seen == ([] if reason is EndReason.ABORT else ["output"])


async def test_the_share_from_the_cache_stays_what_the_first_engine_said():
    request = state()
    request.note_cached(16)
    request.is_continued = True
    request.note_cached(32)
    assert request.collector.num_cached_tokens == 16


# A pooling request among others in flight.

TENSOR = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[1], inline=b"0000")
RESULT = step_pb2.StepExtra(pooling_output=TENSOR)
AT_STOP = Ending(EndReason.STOP)


def registered() -> tuple[OutputProcessor, PoolingState, list[int]]:
    ended: list[int] = []
    processor, state = OutputProcessor(on_end=ended.append), PoolingState()
    processor.register(7, state)
    return processor, state, ended


async def test_the_result_is_there_when_the_request_ends_and_nothing_is_aborted():
    processor, state, ended = registered()
    reported = StepColumns([9, 7], [0, 0], [], {}, {1: 16}, extras={1: [RESULT], 0: [RESULT]})
    assert processor.process(reported) == []
    assert 7 in processor
    assert processor.process(StepColumns([7], [0], [], {0: AT_STOP}, {})) == []
    assert await state.result() == Pooled(TENSOR, 16)
    assert (len(processor), ended) == (0, [7])


@pytest.mark.parametrize(
    ("reason", "error"),
    [(EndReason.STOP, Internal), (EndReason.ERROR, Internal), (EndReason.ABORT, Aborted)],
)
async def test_an_end_without_a_result_is_an_error(reason, error):
    processor, state, _ = registered()
    processor.process(StepColumns([7], [0], [], {0: Ending(reason)}, {}))
    with pytest.raises(error):
        await state.result()


async def test_a_lost_engine_ends_it():
    processor, state, ended = registered()
    processor.lose_all(Loss("engine:1", LossKind.DEATH, "reset"))
    with pytest.raises(Unavailable, match="was lost"):
        await state.result()
    assert ended == [7]


async def test_what_comes_after_its_reader_has_gone_changes_nothing():
    processor, state, _ = registered()
    reader = asyncio.ensure_future(state.result())
    # Behind the reader's own first turn, in which it begins to wait.
    asyncio.get_running_loop().call_soon(reader.cancel)
    await asyncio.wait({reader})
    assert processor.fail(7, Unavailable("too late"))
    assert state.advance([], AT_STOP) == AT_STOP
    assert reader.cancelled()


async def test_after_a_loss_or_a_temporary_refusal_another_engine_may_finish_it():
    processor, state, _ = registered()
    reported = []
    state.on_lost = lambda cause, error: reported.append(cause)
    processor.lose_all(Loss("engine:1", LossKind.DEATH, "reset"))
    processor.register(8, state)
    assert processor.fail(8, Unavailable("drains"))
    processor.register(9, state)
    processor.process(StepColumns([9], [0], [], {0: AT_STOP}, {}, extras={0: [RESULT]}))
    assert (await state.result()).tensor == TENSOR
    assert reported == [LossKind.DEATH, LossKind.REFUSED]


async def test_a_result_of_several_messages_is_joined_and_begins_anew_after_a_loss():
    processor, state, _ = registered()
    state.on_lost = lambda cause, error: None
    first = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[2, 1], inline=b"00001111")
    second = tensor_pb2.Tensor(dtype=tensor_pb2.D_TYPE_FP32, shape=[1, 1], inline=b"2222")
    extras = [step_pb2.StepExtra(pooling_output=part) for part in (first, second)]
    processor.process(StepColumns([7], [0], [], {}, {}, extras={0: extras[:1]}))
    processor.lose_all(Loss("engine:1", LossKind.DEATH, "reset"))
    processor.register(8, state)
    for extra in extras:
        processor.process(StepColumns([8], [0], [], {}, {}, extras={0: [extra]}))
    processor.process(StepColumns([8], [0], [], {0: AT_STOP}, {}))
    tensor = (await state.result()).tensor
    assert (list(tensor.shape), tensor.inline) == ([3, 1], b"000011112222")
