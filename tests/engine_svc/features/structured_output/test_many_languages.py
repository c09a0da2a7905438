"""Many constraints at temperature 1, in large batches: answers are in their language by other validators."""

from __future__ import annotations

import pytest

from engine_svc.core.request import FinishReason
from engine_svc.features.structured_output.backends.backend import Vocabulary
from engine_svc.features.structured_output.extras import StructuredOutput
from tests.acceptance.rig.languages import Completions, make_languages
from tests.engine_svc.features.structured_output.engine_rig import EOS, TOKENIZER, Asked, Rig, text_of

NUM_SCHEMAS, NUM_PATTERNS, NUM_GRAMMARS = 120, 40, 24  # `python -m tests.acceptance languages` has more
MAX_TOKENS = 200
LEAST_FINISHED = 0.9


@pytest.mark.chaos
def test_answers_are_in_their_languages_and_the_same_under_preemption():
    languages = make_languages(NUM_SCHEMAS, NUM_PATTERNS, NUM_GRAMMARS)
    asked = [
        Asked(StructuredOutput(language.constraint, eos_token_ids=(EOS,)), options={"max_tokens": MAX_TOKENS})
        for language in languages
    ]
    batches = Rig(max_num_seqs=64)
    crowded = Rig(max_num_seqs=24, block_size=4, num_kv_blocks=120, max_num_batched_tokens=48)
    try:
        answers, others = batches.answer(asked), crowded.answer(asked)
    finally:
        batches.close()
        crowded.close()
    completions = Completions(Vocabulary(TOKENIZER.to_str(), TOKENIZER.get_vocab_size(), (EOS,)))
    num_whole = 0
    for language, answered in zip(languages, answers, strict=True):
        text, is_whole = text_of(answered.token_ids), answered.end.reason is FinishReason.STOP
        assert is_whole or answered.end.reason is FinishReason.LENGTH, answered.end
        is_right = (
            language.accepts(text) if is_whole else completions.is_viable(language, answered.token_ids, text)
        )
        assert is_right, (language.constraint.text, text)
        num_whole += is_whole
    completions.close()
    assert num_whole >= LEAST_FINISHED * len(languages)
    assert [one.token_ids for one in answers] == [one.token_ids for one in others]
    assert sum(one.request.num_preemptions for one in others) > 0
