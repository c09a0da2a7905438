"""Two texts as one prompt, as a tokenizer itself joins them."""

from __future__ import annotations

from tokenizers import processors

from frontend_svc.text.tokenize.tokenizer import PairTemplate
from tests.frontend_svc.tokenizers import EOS, byte_level_tokenizer, id_of, word_piece_tokenizer


def test_texts_that_were_tokenized_apart_are_joined_as_the_tokenizer_does_it():
    tokenizer = word_piece_tokenizer()
    unknown, end = id_of(tokenizer, "[UNK]"), id_of(tokenizer, EOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A [UNK]",
        pair=f"{EOS} $A [UNK] [UNK] $B {EOS}",
        special_tokens=[(EOS, end), ("[UNK]", unknown)],
    )
    first = tokenizer.encode("the cat sat", add_special_tokens=False).ids
    second = tokenizer.encode("on the mat and", add_special_tokens=False).ids
    joined = PairTemplate(tokenizer).join(first, second)
    assert joined == tokenizer.encode("the cat sat", "on the mat and").ids
    assert (joined[0], joined[-1], joined.count(unknown)) == (end, end, 2)


def test_a_tokenizer_without_a_form_for_pairs_puts_one_text_behind_the_other():
    assert PairTemplate(byte_level_tokenizer()).join([1, 2], [3]) == [1, 2, 3]
