"""Real answers of the embedded model: in the language, and the same whatever else happens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine_svc.core.request import FinishReason
from engine_svc.features.structured_output.constraint import ConstraintKind
from engine_svc.features.structured_output.extras import StructuredOutput
from engine_svc.features.structured_output.runner import StructuredOutputRows
from engine_svc.features.structured_output.scheduler import GrammarEnds
from engine_svc.features.thinking_budget.extras import ThinkingBudget
from engine_svc.features.token_rules.extras import TokenRules
from tests.engine_svc.features.structured_output.engine_rig import (
    EOS,
    Answered,
    Asked,
    Rig,
    ids,
    regex_spec,
    schema_spec,
    spec,
    text_of,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMAR = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/\n'
TAG = json.dumps(
    {
        "structures": [
            {"begin": "<f>", "schema": {"type": "integer", "maximum": 99, "minimum": 0}, "end": "</f>"}
        ],
        "triggers": ["<f>"],
    }
)
CONSTRAINED = [
    Asked(schema_spec(PERSON), options={"max_tokens": 96}),
    Asked(regex_spec(r"[a-z]{3,6}-[0-9]{2}")),
    Asked(spec(ConstraintKind.CHOICE, choices=("yes", "no", "not at all"))),
    Asked(spec(ConstraintKind.GRAMMAR, GRAMMAR)),
    Asked(spec(ConstraintKind.JSON_OBJECT), options={"max_tokens": 96}),
    Asked(spec(ConstraintKind.STRUCTURAL_TAG, TAG)),
    Asked(regex_spec(r"[ab]+"), options={"temperature": 0.0, "max_tokens": 8}),
    Asked(regex_spec(r"(foo|bar){2,9}"), options={"logprobs": 2}),
]
MIXED = [*(one for pair in zip(CONSTRAINED, [Asked()] * len(CONSTRAINED), strict=True) for one in pair)]


def check(answered: Answered, asked: Asked) -> None:
    """Whether an answer is in its language, or a text that was cut by its length."""
    if asked.spec is None:
        return
    text, is_whole = text_of(answered.token_ids), answered.end.reason is FinishReason.STOP
    assert is_whole or answered.end.reason is FinishReason.LENGTH, answered.end
    constraint = asked.spec.constraint
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA | ConstraintKind.JSON_OBJECT if is_whole:
            value = json.loads(text)
            assert isinstance(value, dict)
            if constraint.kind is ConstraintKind.JSON_SCHEMA:
                pytest.importorskip("jsonschema").validate(value, json.loads(constraint.text))
        case ConstraintKind.REGEX if is_whole:
            assert re.fullmatch(constraint.text, text), text
        case ConstraintKind.CHOICE:
            assert text in constraint.choices
        case ConstraintKind.GRAMMAR if is_whole:
            assert re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3})*", text), text
        case ConstraintKind.STRUCTURAL_TAG:
            for number in re.findall("<f>(.*?)</f>", text):
                assert 0 <= int(number) <= 99


@pytest.fixture(scope="module")
def plain() -> Iterator[Rig]:
    rig = Rig(steps_in_flight=1)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def alone(plain: Rig) -> list[list[int]]:
    return alone_in(plain)


def alone_in(rig: Rig) -> list[list[int]]:
    """The answers of requests that are the only ones of their engine."""
    found = []
    for index, one in enumerate(MIXED):
        (answered,) = rig.answer([replace(one, options=one.options | {"seed": index})])
        check(answered, one)
        found.append(answered.token_ids)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps_in_flight": 2, "num_kv_blocks": 60, "block_size": 4, "max_num_batched_tokens": 24},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.chaos),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.chaos),
    ],
    ids=["beside others", "preempted", "tp 2", "pp 2"],
)
def test_answers_are_in_their_language_and_as_alone(alone: list[list[int]], options: dict[str, object]):
    rig = Rig(**options)
    try:
        rig.answer(MIXED)  # so that all grammars are compiled, and the requests begin together
        answers = rig.answer(MIXED)
        if "tensor_parallel_size" in options:  # whose sums round differently
            alone = alone_in(rig)
    finally:
        rig.close()
    for answered, asked in zip(answers, MIXED, strict=True):
        check(answered, asked)
    assert sum(answer.end.reason is FinishReason.STOP for answer in answers[::2]) >= 6
    assert [answer.token_ids for answer in answers] == alone
    if "num_kv_blocks" in options:
        assert sum(answer.request.num_preemptions for answer in answers[::2]) > 0


def test_a_request_that_moves_continues_as_if_it_had_not(plain: Rig, alone: list[list[int]]):
    for index in (0, 2, 6, 10):
        one, whole = MIXED[index], alone[index]
        for num_before in (1, len(whole) // 2, len(whole) - 1):
            moved = Asked(one.spec, (), one.prompt, tuple(whole[:num_before]), one.options | {"seed": index})
            (answered,) = plain.answer([moved])
            assert answered.token_ids == whole[num_before:]


def test_output_of_another_language_ends_with_an_error(plain: Rig):
    (answered,) = plain.answer([Asked(regex_spec("[0-9]+"), output=tuple(ids("x")))])
    assert (answered.end.reason, answered.end.code) == (FinishReason.ERROR, "")
    assert f"does not allow token {ids('x')[0]} at position 0" in answered.end.message


@pytest.mark.parametrize(
    ("constraint", "reason", "text"),
    [
        (regex_spec("[0-9"), "CONSTRAINT_INVALID", "unclosed character class"),
        (regex_spec("(a{1000}){1000}"), "CONSTRAINT_TOO_COMPLEX", "repeats"),
        (
            schema_spec({"minProperties": 3}),
            "CONSTRAINT_NOT_ENFORCED",
            "enforces minProperties at #",
        ),
    ],
)
def test_a_constraint_that_cannot_be_compiled_ends_its_request_alone(
    plain: Rig, alone: list[list[int]], constraint: StructuredOutput, reason: str, text: str
):
    before = plain.metric("triptych_engine_structured_output_failures_total", "prepare")
    bad, good = plain.answer([Asked(constraint), MIXED[1]])
    assert (bad.end.reason, bad.end.code, bad.token_ids) == (FinishReason.ERROR, "INVALID_ARGUMENT", [])
    assert (bad.end.error_reason, bad.end.error_field) == (reason, "sampling.structured_output")
    assert text in bad.end.message
    assert good.token_ids == alone[1]
    assert plain.metric("triptych_engine_structured_output_failures_total", "prepare") == before + 1


def test_equal_constraints_are_compiled_once(plain: Rig):
    def counts() -> tuple[float, int]:
        num_compiled = plain.num_observed("triptych_engine_grammar_compile_seconds")
        return plain.metric("triptych_engine_grammar_cache_hits_total"), num_compiled

    num_hits, num_compiled = counts()
    plain.answer([Asked(regex_spec("(un|deux|trois)"))] * 4)
    assert counts() == (num_hits + 3, num_compiled + 1)


def test_the_end_of_the_language_ends_an_output_that_ignores_ends(plain: Rig):
    (answered,) = plain.answer([Asked(regex_spec("[0-9]{3}"), options={"ignore_eos": True})])
    assert (answered.end.reason, answered.token_ids[-1]) == (FinishReason.STOP, EOS)
    assert re.fullmatch("[0-9]{3}", text_of(answered.token_ids))


def test_rules_that_leave_no_token_end_the_request_with_an_error(plain: Rig):
    def failures(cause: str) -> float:
        return plain.metric("triptych_engine_structured_output_failures_total", cause)

    before = failures("conflict"), failures("run")
    letters = TokenRules(allowed=frozenset(ids("x")))
    budget = ThinkingBudget(1, tuple(ids(" is")), tuple(ids("x")))  # "is" is of the prompt
    answers = plain.answer(
        [
            Asked(regex_spec("[0-9]{3}"), (letters,)),
            Asked(regex_spec("[0-9]{3}"), (budget,)),
            Asked(regex_spec("[0-9]{3}"), options={"min_tokens": 20}),
            Asked(regex_spec("[0-9]{3}"), options={"min_tokens": 20, "ignore_eos": True}),
        ]
    )
    assert all(answered.end.reason is FinishReason.ERROR for answered in answers)
    for answered, rule in zip(answers, ("allowed_token_ids", "thinking_token_budget"), strict=False):
        assert re.search(f"leave no token to choose: .*{rule}", answered.end.message)
        assert re.fullmatch("[0-9]*", text_of(answered.token_ids))
    for answered in answers[2:]:
        assert re.search(r"allows nothing after [1-3] tokens, min_tokens is 20", answered.end.message)
        assert answered.end.error_fields == ("min_tokens", "structured_output")
    assert (failures("conflict"), failures("run")) == (before[0] + 4, before[1])


def test_the_constraint_begins_after_the_reasoning(plain: Rig):
    marker = tuple(ids(" the"))
    asked = [
        Asked(regex_spec("[0-9]{2}", reasoning_end=marker), options={"max_tokens": 200, "ignore_eos": flag})
        for flag in (False, True, False)
    ]
    for answered in plain.answer(asked):
        tokens = answered.token_ids
        begin = next(
            (
                end
                for end in range(len(marker), len(tokens) + 1)
                if tuple(tokens[end - len(marker) : end]) == marker
            ),
            None,
        )
        assert begin is not None, "the model has not ended its reasoning"
        assert re.fullmatch("[0-9]{2}", text_of(tokens[begin:]))


@pytest.mark.parametrize("ignores_eos", [False, True])
def test_the_constraint_begins_behind_reasoning_that_the_model_opens_or_at_once(
    plain: Rig, ignores_eos: bool
):
    marker = tuple(ids(" the"))
    (free,) = plain.answer([Asked(options={"temperature": 0.0})])
    likely, unlikely = tuple(free.token_ids[:2]), tuple(ids("x"))
    options = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": ignores_eos}
    reasoned, at_once = plain.answer(
        [
            Asked(regex_spec("[0-9]{2}", reasoning_end=marker, reasoning_start=mark), options=options)
            for mark in (likely, unlikely)
        ]
    )
    tokens = tuple(reasoned.token_ids)
    assert tokens[:2] == likely
    spec = regex_spec("[0-9]{2}", reasoning_end=marker, reasoning_start=likely)
    assert re.fullmatch("[0-9]{2}", text_of(tokens[spec.begin_in(tokens) :]))
    assert re.fullmatch("[0-9]{2}", text_of(at_once.token_ids))


def test_no_stage_of_the_feature_is_called_in_a_step_without_a_constraint(
    plain: Rig, monkeypatch: pytest.MonkeyPatch
):
    called: list[str] = []
    stages = [name for name in vars(StructuredOutputRows) if not name.startswith("_") and name != "prepares"]
    # The first is asked once for each row, the other comes for rows of the steps before.
    for name in {*stages} - {"uses", "remove_row"}:
        method = getattr(StructuredOutputRows, name)

        def counted(self, *arguments, name=name, method=method):
            called.append(name)
            return method(self, *arguments)

        monkeypatch.setattr(StructuredOutputRows, name, counted)
    monkeypatch.setattr(GrammarEnds, "verdict", lambda *arguments: called.append("verdict"))
    plain.answer([Asked(options={"ignore_eos": flag}) for flag in (False, True)] * 4)
    assert called == []
    plain.answer([Asked(), Asked(regex_spec("[a-f]{3}"), options={"ignore_eos": True})])
    assert {"prepare", "add_row", "on_tokens", "apply", "verdict"} <= {*called}


def test_rows_beside_32_constrained_ones_are_answered_as_without_them(plain: Rig):
    free = [Asked(options={"temperature": 0.0 if index % 2 else 1.0}) for index in range(8)]
    alone = [answered.token_ids for answered in plain.answer(free)]
    rig = Rig(max_num_seqs=40)
    try:
        beside = rig.answer([*free, *CONSTRAINED * 4])
    finally:
        rig.close()
    assert [answered.token_ids for answered in beside[: len(free)]] == alone
    assert len(CONSTRAINED) * 4 == 32
