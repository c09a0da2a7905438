"""One request's way from token ids to text and end, with real tokens."""

from __future__ import annotations

from frontend_svc.output.collector import Collector, Ending, EndReason, OutputKind, OutputPiece, ReaderLimit
from frontend_svc.output.request_state import RequestState
from frontend_svc.text.detokenizer import Detokenizer
from frontend_svc.text.stop_strings import StopBuffer
from tests.frontend_svc.tokenizers import EOS, byte_level_tokenizer, id_of

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


async def test_stop_string_across_steps_ends_the_request():
    output = await run(state("cd"), letters("abc"), letters("d"), letters("e"))
    assert (output.text, output.token_ids) == ("ab", letters("abcd"))


async def test_first_min_tokens_cannot_complete_a_stop_string():
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
