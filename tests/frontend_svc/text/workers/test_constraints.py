"""Constraints in workers: what is checked once, what is kept of it, and what costs a worker its life."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from frontend_svc.text.constraint import AskedConstraint, CheckedConstraint
from frontend_svc.text.workers.verdicts import Verdicts
from frontend_svc.text.workers.work_queue import Work
from frontend_svc.text.workers.workers import TextWorkers
from triptych_kit.errors import InvalidArgument
from triptych_kit.grammars.constraint import Constraint, ConstraintKind, Whitespace

FIELD = "sampling.structured_output"
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "string"}}})
FINE = CheckedConstraint("llguidance", "a")
MakeWorkers = Callable[..., TextWorkers]


def asked(text: str, backends: tuple[str, ...] = ("llguidance",)) -> AskedConstraint:
    return AskedConstraint(
        Constraint(ConstraintKind.REGEX, text, whitespace=Whitespace(False, " ")), backends
    )


class Scripted:
    """Answers with what it is given, in turn."""

    def __init__(self, *answers: CheckedConstraint | InvalidArgument) -> None:
        self._answers = list(answers)

    async def __call__(self, asked: AskedConstraint, field: str) -> CheckedConstraint:
        await asyncio.sleep(0)
        answer = self._answers.pop(0)
        if isinstance(answer, InvalidArgument):
            raise answer
        return answer


async def test_equal_constraints_are_checked_once_at_the_same_time_and_later():
    verdicts = Verdicts(Scripted(FINE))
    finds = [verdicts.find("", asked("a"), FIELD) for _ in range(5)]
    assert await asyncio.gather(*finds) == [FINE] * 5
    assert await verdicts.find("", asked("a"), FIELD) == FINE


async def test_each_request_has_an_error_of_its_own():
    verdicts = Verdicts(Scripted(InvalidArgument("a is wrong", field=FIELD, reason="CONSTRAINT_INVALID")))
    fields = [FIELD, "tools[0].parameters"]
    errors = await asyncio.gather(
        *(verdicts.find("", asked("a"), field) for field in fields), return_exceptions=True
    )
    assert [error.violations for error in errors] == [[(field, "a is wrong")] for field in fields]
    assert errors[0] is not errors[1]


async def test_what_was_found_is_not_known_to_other_tenants():
    other = CheckedConstraint("llguidance", "b")
    verdicts = Verdicts(Scripted(FINE, other))
    assert await verdicts.find("one", asked("a"), FIELD) == FINE
    assert await verdicts.find("two", asked("a"), FIELD) == other


async def test_a_refusal_for_good_is_kept_and_names_the_field_that_asks():
    verdicts = Verdicts(Scripted(InvalidArgument("no", field=FIELD, reason="CONSTRAINT_INVALID")))
    for field in (FIELD, "tools"):
        with pytest.raises(InvalidArgument, match="no") as caught:
            await verdicts.find("", asked("a"), field)
        assert caught.value.reason == "CONSTRAINT_INVALID"
        assert caught.value.violations == [(field, "no")]


@pytest.mark.parametrize("reason", ["CONSTRAINT_TOO_COMPLEX", "TEXT_TIME_LIMIT", "TEXT_REFUSED"])
async def test_a_check_that_ran_out_of_resources_is_made_again(reason):
    verdicts = Verdicts(Scripted(InvalidArgument("no", reason=reason), FINE))
    with pytest.raises(InvalidArgument):
        await verdicts.find("", asked("a"), FIELD)
    assert await verdicts.find("", asked("a"), FIELD) == FINE


async def test_checks_are_counted_by_outcome():
    answers = [
        FINE,
        *(
            InvalidArgument("no", field=FIELD, reason=each)
            for each in ("CONSTRAINT_INVALID", "TEXT_TIME_LIMIT", "TEXT_REFUSED")
        ),
    ]
    verdicts = Verdicts(Scripted(*answers))
    for text in "abcd":
        with contextlib.suppress(InvalidArgument):
            await verdicts.find("", asked(text), FIELD)
    await verdicts.find("", asked("a"), FIELD)
    outcomes = {outcome: count for (outcome,), count in verdicts.outcomes.values.items()}
    assert outcomes == {"accepted": 1, "invalid": 1, "not_enforced": 0, "too_complex": 1, "failed": 1}
    assert verdicts.num_known == 1
    assert sum(verdicts.check_s.counts) == 4


async def test_a_cancelled_request_leaves_the_check_to_others():
    verdicts = Verdicts(Scripted(FINE))
    first, second = (asyncio.create_task(verdicts.find("", asked("a"), FIELD)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == FINE


async def test_a_tenant_with_many_constraints_drops_its_own_oldest_ones():
    verdicts = Verdicts(Scripted(*[FINE] * 101), max_tenant_bytes=2100)
    await verdicts.find("other", asked("x"), FIELD)
    for index in range(100):
        await verdicts.find("busy", asked(f"a{index}"), FIELD)
    assert len(verdicts) == 1 + 4
    # Both are known: the script has no answer left.
    assert await verdicts.find("other", asked("x"), FIELD) == FINE
    assert await verdicts.find("busy", asked("a99"), FIELD) == FINE


async def test_many_tenants_share_a_limit():
    verdicts = Verdicts(Scripted(*[FINE] * 100), max_bytes=2100)
    for index in range(100):
        await verdicts.find(f"tenant-{index}", asked("a"), FIELD)
    assert len(verdicts) == 4
    assert await verdicts.find("tenant-99", asked("a"), FIELD) == FINE


async def test_a_verdict_beyond_the_limit_is_not_kept():
    verdicts = Verdicts(Scripted(CheckedConstraint("llguidance", "a" * 3000)), max_tenant_bytes=2100)
    await verdicts.find("", asked("a"), FIELD)
    assert len(verdicts) == 0


def test_a_constraint_is_a_long_task_whatever_its_size():
    loop = asyncio.new_event_loop()
    try:
        assert Work(None, {}, b"", FIELD, loop.create_future(), is_slow=True).is_long
    finally:
        loop.close()


@pytest.fixture
async def make_workers() -> AsyncIterator[MakeWorkers]:
    made: list[TextWorkers] = []

    def make(*arguments: object, **options: object) -> TextWorkers:
        made.append(TextWorkers(*arguments, **options))
        return made[-1]

    yield make
    for workers in made:
        await workers.close()


async def test_122_a_schema_that_explodes_costs_its_request_a_status_and_its_worker_the_life(make_workers):
    many = {"properties": {f"p{index}": {"type": "string"} for index in range(2000)}}
    workers = make_workers(1, time_limit_s=0.6)
    schema = Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA)
    small = AskedConstraint(schema, ("llguidance",))
    assert (await workers.check_constraint(small, FIELD)).backend == "llguidance"
    (before,) = workers.process_ids
    explosion = dataclasses.replace(schema, text=json.dumps({"prefixItems": [many] * 7}))
    with pytest.raises(InvalidArgument, match=r"longer than the limit of 0\.6 s") as caught:
        await workers.check_constraint(dataclasses.replace(small, constraint=explosion), FIELD)
    assert caught.value.reason == "TEXT_TIME_LIMIT"
    assert (await workers.check_constraint(asked("a"), FIELD)).backend == "llguidance"
    assert before not in workers.process_ids


async def test_a_constraint_beyond_the_memory_limit_is_refused_alone(make_workers):
    program = "import frontend_svc.text.workers.process as process; process._CONSTRAINT_BYTES = 4 << 20; "
    workers = make_workers(1, command=(sys.executable, "-c", program + "process.main()"))
    many = json.dumps({"enum": [f"value {index}" for index in range(40_000)]})
    large = AskedConstraint(Constraint(ConstraintKind.JSON_SCHEMA, many), ("llguidance",))
    with pytest.raises(InvalidArgument, match=r"more memory than the limit|too much memory") as caught:
        await workers.check_constraint(large, FIELD)
    assert caught.value.reason == "CONSTRAINT_TOO_COMPLEX"
    assert (await workers.check_constraint(asked("a"), FIELD)).backend == "llguidance"


async def test_122_a_refusal_says_what_is_wrong(make_workers):
    with pytest.raises(InvalidArgument, match="unclosed group") as caught:
        await make_workers(1).check_constraint(asked("(a"), FIELD)
    assert caught.value.reason == "CONSTRAINT_INVALID"


async def test_a_constraint_that_its_workers_do_not_survive_is_too_complex(make_workers, tmp_path):
    script = str(Path(__file__).with_name("dying_worker.py"))
    workers = make_workers(1, command=(sys.executable, script, str(tmp_path / "diary"), "2"))
    with pytest.raises(InvalidArgument, match="ended the processes that checked it") as caught:
        await workers.check_constraint(asked("a"), FIELD)
    assert caught.value.reason == "CONSTRAINT_TOO_COMPLEX"
    assert caught.value.violations[0][0] == FIELD
