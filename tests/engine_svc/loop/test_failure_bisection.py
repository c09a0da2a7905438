"""Which requests run, and which are suspect, for every kind of failure: the table of a bisection."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_svc.core.step import StepPlan, StepResult
from engine_svc.loop.failure_bisection import MAX_FAILURES, BisectionDecision, FailureBisector

WORKED = StepResult(1, [])


def plan_of(request_ids: list[str], *, samples: bool = True) -> StepPlan:
    return StepPlan(1, request_ids=request_ids, samples=[samples] * len(request_ids))


def bisect(
    bisector: FailureBisector, suspects: list[str], fails: Callable[[frozenset[str]], bool]
) -> tuple[set[str], bool, int]:
    """Go on as a loop would until the bisection is over: suspects, whether it is fatal, how many steps."""
    decision: BisectionDecision | None = bisector.failed(suspects, 100)
    culprits: set[str] = set()
    num_steps = 0
    while decision is not None:
        culprits |= set(decision.culprits)
        if decision.is_fatal or decision.only is None:
            return culprits, decision.is_fatal, num_steps
        num_steps += 1
        group = decision.only - culprits
        if fails(group):
            decision = bisector.failed([name for name in suspects if name in group], 10)
            continue
        answer = bisector.on_step_done(plan_of(sorted(group)), WORKED)
        decision = answer if answer is not None else BisectionDecision(only=decision.only)
    raise AssertionError("a bisection has an end")


@pytest.mark.parametrize("num_suspects", [1, 2, 3, 64])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_one_culprit_is_found_in_few_steps(num_suspects, place):
    suspects = [f"r{index}" for index in range(num_suspects)]
    culprit = suspects[place % num_suspects]
    found, is_fatal, num_steps = bisect(FailureBisector(), suspects, lambda group: culprit in group)
    assert (found, is_fatal) == ({culprit}, False)
    assert num_steps <= 2 * num_suspects.bit_length() + 2


def test_who_fails_alone_is_heard_again_behind_all_others_and_ended_if_that_fails_too():
    bisector = FailureBisector()
    assert bisector.failed(["c", "b", "a"], 30).only == {"c"}
    assert bisector.failed(["c"], 10) == BisectionDecision(only=frozenset({"b", "a"}))
    assert bisector.on_step_done(plan_of(["a", "b"]), WORKED) == BisectionDecision(only=frozenset({"c"}))
    assert bisector.failed(["c"], 10) == BisectionDecision(culprits=("c",))
    assert not bisector.is_open


@pytest.mark.parametrize("num_suspects", [1, 2, 3, 16])
@pytest.mark.parametrize("failing_step", range(6))
def test_a_single_lone_failure_ends_no_request(num_suspects, failing_step):
    steps: list[frozenset[str]] = []

    def fails(group: frozenset[str]) -> bool:
        steps.append(group)
        # A request that was alone in the step that began it has failed alone already.
        return len(steps) == failing_step + 1 and num_suspects > 1

    suspects = [f"r{index}" for index in range(num_suspects)]
    assert bisect(FailureBisector(), suspects, fails)[:2] == (set(), False)


@pytest.mark.parametrize("culprits", [{"r0", "r1"}, {"r0", "r7", "r15"}, {"r3", "r6", "r9", "r12"}])
def test_all_culprits_are_ended_while_other_steps_succeed_in_between(culprits):
    num_suspects = 2 if len(culprits) == 2 else 16
    suspects = [f"r{index}" for index in range(num_suspects)]
    found, is_fatal, _ = bisect(FailureBisector(), suspects, lambda group: not culprits.isdisjoint(group))
    assert (found, is_fatal) == (culprits, False)


def test_a_lone_suspect_that_is_gone_is_not_rerun():
    bisector = FailureBisector()
    assert bisector.failed(["b", "a"], 20).only == {"b"}
    assert bisector.failed(["b"], 10).only == {"a"}
    assert bisector.review({"a": 1}) is None
    assert bisector.review({}) == BisectionDecision()
    assert not bisector.is_open


def test_the_newer_half_is_heard_first_and_alone():
    decision = FailureBisector().failed(["d", "c", "b", "a"], 40)
    assert decision == BisectionDecision(only=frozenset({"d", "c"}))


def test_an_error_that_does_not_come_back_is_nobodys():
    assert bisect(FailureBisector(), ["b", "a"], lambda group: False) == (set(), False, 2)


def test_an_error_of_company_alone_is_fatal_at_its_third_time():
    bisector = FailureBisector()
    ends = [bisect(bisector, ["b", "a"], lambda group: False)[1] for _ in range(MAX_FAILURES)]
    assert ends == [False, False, True]


def test_failures_far_apart_have_nothing_to_do_with_each_other():
    bisector = FailureBisector()
    for _ in range(2 * MAX_FAILURES):
        assert bisect(bisector, ["b", "a"], lambda group: False) == (set(), False, 2)
        for _ in range(200):
            assert bisector.on_step_done(plan_of(["a", "b"]), WORKED) is None


def test_no_request_is_ended_where_all_fail():
    suspects = [f"r{index}" for index in range(16)]
    found, is_fatal, _ = bisect(FailureBisector(), suspects, lambda group: True)
    assert (found, is_fatal) == (set(), True)


def test_a_chunk_that_samples_nothing_clears_no_suspect():
    bisector = FailureBisector()
    assert bisector.failed(["a"], 5).only == {"a"}
    assert bisector.on_step_done(plan_of(["a"], samples=False), WORKED) is None
    assert bisector.is_open
    assert bisector.on_step_done(plan_of(["a"]), WORKED) == BisectionDecision()
    assert not bisector.is_open


def test_suspects_that_are_gone_are_not_waited_for():
    bisector = FailureBisector()
    assert bisector.failed(["d", "c", "b", "a"], 40).only == {"d", "c"}
    assert bisector.review({"c": 1, "b": 1}) is None
    assert bisector.review({"b": 1}) == BisectionDecision(only=frozenset({"b"}))
    assert bisector.review({}) == BisectionDecision()


def test_failing_steps_without_requests_end_the_engine_at_the_third():
    bisector = FailureBisector()
    assert [bisector.failed([], 0).is_fatal for _ in range(3)] == [False, False, True]


Steps = list[tuple[list[str], list[int], list[int]]]


def broken(steps: Steps) -> bool:
    """Whether steps of these requests, with these rows broken and these barred, are the device's fault."""
    bisector = FailureBisector()
    decisions = []
    for request_ids, non_finite, barred in steps:
        result = StepResult(1, [[] for _ in request_ids], non_finite=non_finite, barred=barred)
        decisions.append(bisector.on_step_done(plan_of(request_ids), result))
    return any(decision is not None and decision.is_fatal for decision in decisions)


def steps_of(*steps: str) -> Steps:
    """A step is its requests; those in capitals have finite logits, as the same letters broken later."""
    return [
        ([name.lower() for name in step], [row for row, name in enumerate(step) if name.islower()], [])
        for step in steps
    ]


@pytest.mark.parametrize(
    ("steps", "is_fatal"),
    [
        (["ABCD", "ab", "cd"], True),
        (["ABCD", "abcd", "abcd"], True),
        (["AB", "a", "b"], False),
        (["ABCD", "a", "b", "c", "d"], True),
        (["ABCD", "abcd", "E", "abcd"], False),
        (["ABCDEFGH", "abcdefgh"], False),
        # Of some that never had a finite row nothing is known, whatever the others before them had.
        (["abcd", "abcd"], False),
        (["WXYZ", "a", "b", "c", "d", "e", "f"], False),
        (["ABC", "abc", "d", "e"], False),
        (["ABCd", "abc", "d"], False),
    ],
)
def test_logits_of_which_none_is_finite_any_more_are_the_devices_fault_in_two_steps_and_four_requests(
    steps, is_fatal
):
    assert broken(steps_of(*steps)) is is_fatal


def test_very_many_requests_in_a_row_without_a_finite_logit_are_the_devices_fault_as_well():
    strangers: Steps = [([f"r{index}"], [0], []) for index in range(64)]
    assert not broken(strangers[:63])
    assert broken(strangers)
    assert not broken([*strangers[:40], (["sound"], [], []), *strangers[40:]])


def test_a_step_that_samples_nothing_is_no_sign_of_health():
    bisector = FailureBisector()
    for plan in (plan_of([*"abcd"]), plan_of(["chunk"])):
        plan.samples = [name != "chunk" for name in plan.request_ids]
        bisector.on_step_done(plan, StepResult(1, [[] for _ in plan.request_ids]))
    result = StepResult(1, [[]] * 4, non_finite=[0, 1, 2, 3])
    bisector.on_step_done(plan_of([*"abcd"]), result)
    decision = bisector.on_step_done(plan_of([*"abcd"]), result)
    assert decision is not None and decision.is_fatal


def test_who_was_in_two_steps_when_the_first_came_back_counts_once():
    assert not broken(steps_of("ABCD", "ab", "ab"))
    assert broken(steps_of("ABCD", "ab", "ab", "cd"))


def test_rows_whose_rules_leave_no_token_say_nothing_of_the_device():
    everybody = [*range(8)]
    assert not broken([([*"abcdefgh"], [], everybody)] * 4)
    # Neither for nor against it.
    sound = ([*"abcdz"], [], [])
    assert broken([sound, ([*"abz"], [0, 1], [2]), (["z"], [], [0]), ([*"cdz"], [0, 1], [2])])
