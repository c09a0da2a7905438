"""What a step tells reaches those who asked, once, and keeps its order when steps are merged."""

from __future__ import annotations

from engine_svc.core.step import PromptPlaces, StepPlan, StepResult, TokenLogprobs
from engine_svc.loop.mailbox import Outbox
from engine_svc.loop.step_output import StepOutput, Teller, Told


def one(logprob: float) -> TokenLogprobs:
    return TokenLogprobs([logprob], [1], 1, [5], [logprob])


def places(first: int, num: int) -> PromptPlaces:
    logprobs = [-float(place) for place in range(first, first + num)]
    return PromptPlaces(first, TokenLogprobs(logprobs, list(range(first, first + num))))


def tell(teller: Teller, routes: dict, **told: object) -> dict[str, Told]:
    plan = StepPlan(1, request_ids=["a", "b", "c"])
    return teller.tell(plan, StepResult(1, [[], [], []], **told), routes)


ROUTES = {"a": ("first", 7), "b": ("second", 7), "c": ("first", 8)}


def test_each_session_is_told_of_its_own_requests_by_handle():
    told = tell(Teller(), ROUTES, logprobs={0: one(-1.0), 1: one(-2.0), 2: one(-3.0)})
    assert {name: part.sampled for name, part in told.items()} == {
        "first": {7: one(-1.0), 8: one(-3.0)},
        "second": {7: one(-2.0)},
    }


def test_nobody_is_told_of_a_request_that_is_gone_and_nothing_is_kept_of_it():
    teller = Teller()
    assert tell(teller, {}, logprobs={0: one(-1.0)}, prompt_logprobs={1: places(1, 3)}) == {}
    # Its id comes again, and is told all of its prompt.
    assert tell(teller, ROUTES, prompt_logprobs={1: places(1, 2)})["second"].prompts == {7: [places(1, 2)]}


def test_places_that_a_preempted_request_computes_again_are_told_once():
    teller = Teller()
    steps = [(1, 4), (5, 2), (1, 3), (4, 5), (1, 8)]
    told = [tell(teller, ROUTES, prompt_logprobs={0: places(*step)}) for step in steps]
    assert told[0]["first"].prompts == {7: [places(1, 4)]}
    assert told[1]["first"].prompts == {7: [places(5, 2)]}
    assert told[2] == {}
    assert told[3]["first"].prompts == {7: [places(7, 2)]}
    assert told[4] == {}
    teller.forget("a")
    assert tell(teller, ROUTES, prompt_logprobs={0: places(1, 1)})["first"].prompts == {7: [places(1, 1)]}


def test_a_prompt_of_one_token_is_told_of_once_too():
    teller = Teller()
    assert tell(teller, ROUTES, prompt_logprobs={0: places(1, 0)})["first"].prompts == {7: [places(1, 0)]}
    assert tell(teller, ROUTES, prompt_logprobs={0: places(1, 0)}) == {}


def test_a_step_keeps_what_is_told_of_the_tokens_that_it_has():
    output = StepOutput(1, [5, 6, 7], [1, 0, 2], [9, 9, 9])
    several = TokenLogprobs([-1.0, -2.0, -3.0], [1, 2, 3], 2, [1, 2, 3, 4, 5, 6], [0.0] * 6)
    output.tell(Told({5: several, 6: one(-1.0), 7: several, 8: one(-2.0)}))
    assert output.told.sampled == {
        5: TokenLogprobs([-1.0], [1], 2, [1, 2], [0.0] * 2),
        7: TokenLogprobs([-1.0, -2.0], [1, 2], 2, [1, 2, 3, 4], [0.0] * 4),
    }


def test_steps_that_are_merged_tell_what_all_told_in_order():
    outbox = Outbox(max_bytes=1_000_000, wake=lambda: None)
    for number in range(40):
        output = StepOutput(number, [5, 6], [1, 1], [number, number])
        output.tell(Told({5: one(-float(number))}, {6: [places(number + 1, 1)]}))
        outbox.publish(output)
    merged = outbox.take()
    assert merged.told.sampled[5].logprobs == [-float(number) for number in range(40)]
    assert merged.told.sampled[5].top_logprobs == merged.told.sampled[5].logprobs
    assert [part.first_position for part in merged.told.prompts[6]] == list(range(1, 41))
    assert dict(zip(merged.handles, merged.num_tokens, strict=True)) == {5: 40, 6: 40}


def test_what_is_told_counts_for_the_size_of_what_is_unread():
    outbox = Outbox(max_bytes=10_000, wake=lambda: None)
    for number in range(30):
        output = StepOutput(number, [5], [0], [])
        output.tell(Told(prompts={5: [PromptPlaces(1, TokenLogprobs([-1.0] * 50, [1] * 50))]}))
        outbox.publish(output)
    assert outbox.has_overflowed
