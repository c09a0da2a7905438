"""A vocabulary that another process reads: masks are those of one that is read here, also if it is ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine_svc.core.errors import RequestFailed
from engine_svc.features.structured_output.backends.backend import Matcher, Vocabulary
from engine_svc.features.structured_output.backends.llguidance_backend import LLGuidanceBackend
from engine_svc.features.structured_output.constraint import Constraint, ConstraintKind
from engine_svc.features.structured_output.extras import StructuredOutput
from engine_svc.features.structured_output.grammars import Grammars
from engine_svc.features.structured_output.vocabulary_process import VocabularyProcess
from tests.engine_svc.features.structured_output.test_backends import (
    EOS,
    SIZE,
    TITLES,
    TOKENIZER,
    TOKENIZER_JSON,
    ids,
    marked_vocabulary,
    regex,
    sampled,
    schema,
)

VOCABULARY = Vocabulary(TOKENIZER_JSON, SIZE, (EOS,))


def process_of(vocabulary: Vocabulary) -> Iterator[VocabularyProcess]:
    made = VocabularyProcess(vocabulary)
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def process() -> Iterator[VocabularyProcess]:
    yield from process_of(VOCABULARY)


def children() -> set[int]:
    """The processes that this one has started and that have not ended."""
    return {
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        for fields in [text_of(path).rpartition(") ")[2].split()]
        if fields and fields[1] == str(os.getpid()) and fields[0] != "Z"
    }


def text_of(path: Path) -> str:
    # A process may end meanwhile.
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def mask_of(matcher: Matcher) -> list[int]:
    masks = torch.zeros(1, VOCABULARY.num_words, dtype=torch.int32)
    matcher.fill_mask(masks, 0)
    return masks[0].tolist()


@pytest.mark.parametrize(
    "constraint",
    [schema(TITLES), schema({"type": "string", "maxLength": 20}), regex("the (quick|quiet) fox: ÄÖ😀+")],
    ids=["forced", "free", "bytes"],
)
def test_masks_and_forced_tokens_are_those_of_a_vocabulary_that_is_read_here(process, constraint):
    here, there = LLGuidanceBackend(VOCABULARY), LLGuidanceBackend(VOCABULARY, process=process)
    for seed in range(3):
        tokens = sampled(here.compile(constraint).matcher(), seed)
        assert tokens
        ours, theirs = here.compile(constraint).matcher(), there.compile(constraint).matcher()
        for token in tokens:
            assert mask_of(theirs) == mask_of(ours)
            assert theirs.accept([token]) == ours.accept([token]) == 1
        assert mask_of(theirs) == mask_of(ours)


def test_several_masks_are_made_at_once(process):
    backend = LLGuidanceBackend(VOCABULARY, 2, process)
    compiled = backend.compile(schema(TITLES))
    matchers = [compiled.matcher() for _ in range(8)]
    masks = torch.zeros(8, VOCABULARY.num_words, dtype=torch.int32)
    text = ids('[{"title":')
    for length, matcher in enumerate(matchers):
        assert matcher.accept(text[:length]) == min(length, len(text))
    assert backend.fill_masks([(matcher, row) for row, matcher in enumerate(matchers)], masks) == []
    assert masks.tolist() == [mask_of(matcher) for matcher in matchers]


@pytest.mark.parametrize("is_special", [True, False])
def test_markers_have_their_ids(is_special):
    vocabulary = marked_vocabulary(is_special=is_special)
    (process,) = (each for each in process_of(vocabulary))
    here = LLGuidanceBackend(vocabulary)
    assert process.marker_ids == here.special_ids
    assert vocabulary.size - 1 in process.special_token_ids


def test_a_process_that_was_ended_is_replaced(process):
    text = b"the quick brown fox"
    before = process(text)
    assert before == TOKENIZER.encode(text.decode(), add_special_tokens=False).ids
    pid = process.pid
    os.kill(pid, signal.SIGKILL)
    assert process(b"another text") == TOKENIZER.encode("another text", add_special_tokens=False).ids
    assert process.pid != pid
    assert process(text) == before


def test_what_llguidance_does_not_read_is_refused_and_leaves_no_process():
    before = children()
    unread = json.loads(TOKENIZER_JSON) | {"decoder": None}
    grammars = Grammars(
        Vocabulary(json.dumps(unread), SIZE, (EOS,)),
        num_threads=1,
        max_entries=8,
        max_bytes=1 << 20,
        max_quick_chars=0,
    )
    spec = StructuredOutput(Constraint(ConstraintKind.REGEX, "a+"))
    with pytest.raises(RequestFailed, match="llguidance cannot be used with this model: can't") as first:
        grammars.compile(spec)
    with pytest.raises(RequestFailed) as second:
        grammars.compile(spec)
    assert second.value.message == first.value.message
    assert children() == before
    grammars.close()


def test_grammars_of_a_large_vocabulary_start_with_the_first_request_and_end_with_the_engine():
    grammars = Grammars(VOCABULARY, num_threads=1, max_entries=8, max_bytes=1 << 20, max_quick_chars=0)
    before = children()
    compiled = grammars.compile(StructuredOutput(schema(TITLES))).compiled
    assert compiled.matcher().accept(ids('[{"title": 1}')) == len(ids('[{"title": 1}'))
    # One writes the grammar.
    assert len(children() - before) == 2
    grammars.close()
    assert children() == before
