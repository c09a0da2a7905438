"""What frontend processes of one host share: the requests that crashed engines, and turns on an engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from frontend_svc.generation.poison import Content, InnocentPrompts, PoisonRecord, ProbationLocks
from frontend_svc.generation.suspects import PoisonQuarantine, Suspect
from frontend_svc.output.loss import LossKind
from tests.processes import running, source_environment
from triptych_kit.errors import Internal


def content_of(prompt: Sequence[int], account: str = "", model: str = "m") -> Content:
    return Content(account, model, np.array(prompt, dtype="<i4").tobytes())


POISON = range(100)


def refusal_of(record: PoisonRecord, content: Content, *, of_account: bool = False) -> Internal | None:
    try:
        (record.check_account if of_account else record.check_prompt)(lambda: content)
    except Internal as error:
        return error
    return None


def test_a_recorded_prompt_is_refused_with_its_incident_by_every_process_of_the_stack(tmp_path: Path):
    incident_id = PoisonRecord(tmp_path).add(content_of(POISON))
    refusal = refusal_of(PoisonRecord(tmp_path), content_of(POISON))
    assert refusal is not None
    assert refusal.reason == "QUARANTINED"
    assert refusal.metadata == {"incident_id": incident_id}
    assert incident_id in refusal.message
    assert refusal_of(PoisonRecord(tmp_path, stack="another"), content_of(POISON)) is None


@pytest.mark.parametrize("prompt", [[*POISON, 5], [*range(64), *range(9)]])
def test_a_prompt_that_begins_alike_is_refused(tmp_path: Path, prompt: Sequence[int]):
    record = PoisonRecord(tmp_path)
    record.add(content_of(POISON))
    assert refusal_of(record, content_of(prompt)) is not None


def test_a_prompt_without_tokens_is_like_no_other(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    record.add(content_of([]))
    assert refusal_of(record, content_of([])) is not None
    assert refusal_of(record, content_of([5])) is None


@pytest.mark.parametrize(
    "other", [content_of(POISON[1:]), content_of(POISON, "another"), content_of(POISON, model="other")]
)
def test_another_prompt_account_or_model_is_served(tmp_path: Path, other: Content):
    record = PoisonRecord(tmp_path)
    record.add(content_of(POISON))
    assert refusal_of(record, other) is None
    assert refusal_of(record, other, of_account=True) is None


def test_what_innocent_prompts_begin_with_tells_no_poison(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    record.innocent.add(content_of([*range(90), 1, 2, 3], "another"))
    record.add(content_of(POISON))
    assert refusal_of(record, content_of([*range(90), 7, 8, 9])) is None
    assert refusal_of(record, content_of([*range(96), 7, 8, 9])) is not None


def test_of_an_account_with_poison_innocent_prompts_alone_are_served(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    record.innocent.add(content_of([7, 8], "a"))
    record.innocent.add(content_of([7, 9], "b"))
    assert refusal_of(record, content_of([7], "a"), of_account=True) is None
    incident_id = record.add(content_of(POISON, "a"))
    assert refusal_of(record, content_of([7, 8], "a"), of_account=True) is None
    refusal = refusal_of(record, content_of([7, 9], "a"), of_account=True)
    assert refusal is not None and refusal.metadata == {"incident_id": incident_id}
    assert refusal_of(record, content_of([7], "b"), of_account=True) is None


def test_a_prompt_that_turns_out_to_be_poison_is_innocent_no_more(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    record.innocent.add(content_of(POISON, "a"))
    record.add(content_of(POISON, "a"))
    assert content_of(POISON, "a") not in record.innocent
    assert refusal_of(record, content_of(POISON, "a"), of_account=True) is not None


def test_innocent_prompts_have_limits():
    prompts = InnocentPrompts(max_prompts=3, max_bytes=40)
    contents = [content_of([index, index]) for index in range(4)]
    for content in contents:
        prompts.add(content)
    assert [content in prompts for content in contents] == [False, True, True, True]
    prompts.add(contents[1])
    prompts.add(content_of(range(6)))
    assert [content in prompts for content in contents] == [False, True, False, True]


def test_content_is_not_asked_for_where_nothing_is_recorded(tmp_path: Path):
    def never() -> Content:
        raise AssertionError

    for record in (PoisonRecord(tmp_path), PoisonRecord()):
        record.check_prompt(never)
        record.check_account(never)


def age(folder: Path, incident_id: str, seconds: float) -> None:
    [file] = folder.glob(f"quarantine/*/*.{incident_id}")
    at = time.time() - seconds
    os.utime(file, (at, at))


def test_it_is_forgotten_after_ten_minutes(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    incident_id = record.add(content_of(POISON))
    age(tmp_path, incident_id, 595)
    assert refusal_of(record, content_of(POISON)) is not None
    age(tmp_path, incident_id, 600)
    assert refusal_of(record, content_of(POISON)) is None
    record.add(content_of([5]))
    assert len(list(tmp_path.glob("quarantine/*/*"))) == 1


def test_the_oldest_makes_room_where_there_are_too_many(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    for index in range(256):
        age(tmp_path, record.add(content_of([index])), 300 - index)
    record.add(content_of([256]))
    assert len(list(tmp_path.glob("quarantine/*/*"))) == 256
    refused = [index for index in (0, 1, 256) if refusal_of(record, content_of([index])) is not None]
    assert refused == [1, 256]


def test_a_folder_that_cannot_be_written_leaves_each_process_its_own(tmp_path: Path):
    (tmp_path / "quarantine").write_text("no folder")
    record = PoisonRecord(tmp_path)
    incident_id = record.add(content_of(POISON))
    assert refusal_of(record, content_of(POISON)) is not None
    assert [entry.incident_id for entry in record.entries()] == [incident_id]
    assert record.clear() == 1
    assert refusal_of(record, content_of(POISON)) is None


def test_an_operator_sees_what_is_recorded_and_clears_it(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    first = record.add(content_of(POISON, "a"))
    age(tmp_path, first, 20)
    second = record.add(content_of([1, 2], "b", "other"))
    entries = PoisonRecord(tmp_path).entries()
    assert [(one.incident_id, one.account, one.model, one.num_tokens) for one in entries] == [
        (second, "b", "other", 2),
        (first, "a", "m", 64),
    ]
    assert entries[1].left_s == pytest.approx(580, abs=2)
    assert record.clear("unknown") == 0
    assert record.clear(first) == 1
    assert [one.incident_id for one in record.entries()] == [second]
    assert record.clear() == 1


HOLDS_A_LOCK = """
import pathlib, sys
from frontend_svc.generation.poison import ProbationLocks
locks = ProbationLocks(pathlib.Path(sys.argv[1]))
print(locks.take("a"), flush=True)
sys.stdin.read()
"""


def test_a_suspect_waits_while_another_process_has_one_on_the_engine(tmp_path: Path):
    locks = ProbationLocks(tmp_path)
    suspects, suspect = PoisonQuarantine(locks), Suspect()
    suspects.lose(suspect, "dead", LossKind.DEATH, had_output=False)
    assert suspects.may_go(suspect, "a", lambda: 2)
    command = (sys.executable, "-c", HOLDS_A_LOCK, str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with running(*command, env=source_environment(), **pipes) as other:
        assert other.stdout is not None and other.stdout.readline() == b"True\n"
        assert not suspects.may_go(suspect, "a", lambda: 2)
        assert suspects.is_locked_out
        assert suspects.may_go(suspect, "b", lambda: 2)
        # Where it is sent there in spite of that, it is not found to be the cause.
        suspects.send(suspect, "a")
        assert not suspects.lose(suspect, "a", LossKind.DEATH, had_output=False)
    assert suspects.may_go(suspect, "a", lambda: 2)
    locks.close()


def test_an_engine_is_free_for_other_processes_once_no_suspect_is_on_it(tmp_path: Path):
    locks = Released(tmp_path)
    suspects, first, second = PoisonQuarantine(locks), Suspect(), Suspect()
    for suspect in (first, second):
        suspects.lose(suspect, "dead", LossKind.DEATH, had_output=False)
    suspects.send(first, "a")
    suspects.pass_over(first)
    suspects.send(second, "a")
    assert locks.taken == {"a"}
    suspects.clear(first)
    assert locks.taken == {"a"}
    suspects.clear(second)
    assert locks.taken == set()
    suspects.lose(first, "dead", LossKind.DEATH, had_output=False)
    suspects.send(first, "a")
    assert suspects.lose(first, "a", LossKind.DEATH, had_output=False)
    assert locks.taken == set()
    locks.close()


class Released(ProbationLocks):
    """Knows which locks it has."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.taken: set[str] = set()

    def take(self, address: str) -> bool:
        self.taken.add(address)
        return super().take(address)

    def release(self, address: str) -> None:
        self.taken.discard(address)
        super().release(address)
