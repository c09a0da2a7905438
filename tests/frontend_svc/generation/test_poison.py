"""What frontend processes of one host share: the requests that crashed engines, and turns on an engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from frontend_svc.generation import poison
from frontend_svc.generation.poison import Content, InnocentPrompts, PoisonRecord, ProbationLocks
from frontend_svc.generation.suspects import PoisonQuarantine, Suspect, Turn
from tests.processes import running, source_environment
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.clock import FakeClock
from triptych_kit.errors import Internal


def content_of(
    prompt: Sequence[int], account: str = "", model: str = "m", parameters: bytes = b""
) -> Content:
    return Content(account, model, np.array(prompt, dtype="<i4").tobytes(), parameters)


POISON = range(100)


def refusal_of(record: PoisonRecord, content: Content) -> Internal | None:
    try:
        record.check(content)
    except Internal as error:
        return error
    return None


def test_a_recorded_prompt_is_refused_with_its_incident_by_every_process_of_the_stack(tmp_path: Path):
    incident_id = PoisonRecord(tmp_path).note_poison([content_of(POISON)])
    refusal = refusal_of(PoisonRecord(tmp_path), content_of(POISON))
    assert refusal is not None
    assert refusal.reason == "QUARANTINED"
    assert refusal.metadata == {"incident_id": incident_id}
    assert incident_id in refusal.message
    assert refusal_of(PoisonRecord(tmp_path, stack="another"), content_of(POISON)) is None


@pytest.mark.parametrize("prompt", [[*POISON, 5], [*range(64), *range(9)]])
def test_a_prompt_that_begins_alike_is_refused(tmp_path: Path, prompt: Sequence[int]):
    record = PoisonRecord(tmp_path)
    record.note_poison([content_of(POISON)])
    assert refusal_of(record, content_of(prompt)) is not None


def test_a_prompt_without_tokens_is_like_no_other(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    record.note_poison([content_of([])])
    assert refusal_of(record, content_of([])) is not None
    assert refusal_of(record, content_of([5])) is None


@pytest.mark.parametrize(
    "other", [content_of(POISON[1:]), content_of(POISON, "another"), content_of(POISON, model="other")]
)
def test_another_prompt_account_or_model_is_served(tmp_path: Path, other: Content):
    record = PoisonRecord(tmp_path)
    record.note_poison([content_of(POISON)])
    assert refusal_of(record, other) is None


def test_what_innocent_prompts_begin_with_tells_no_poison(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    record.innocent.add(content_of([*range(90), 1, 2, 3], "another"))
    record.note_poison([content_of(POISON)])
    assert refusal_of(record, content_of([*range(90), 7, 8, 9])) is None
    assert refusal_of(record, content_of([*range(96), 7, 8, 9])) is not None


def test_of_an_account_with_poison_innocent_prompts_alone_are_served(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    record.innocent.add(content_of([7, 8], "a"))
    record.innocent.add(content_of([7, 9], "b"))
    assert refusal_of(record, content_of([7], "a")) is None
    incident_id = record.note_poison([content_of(POISON, "a")])
    assert refusal_of(record, content_of([7, 8], "a")) is None
    refusal = refusal_of(record, content_of([7, 9], "a"))
    assert refusal is not None and refusal.metadata == {"incident_id": incident_id}
    assert refusal_of(record, content_of([7], "b")) is None


def test_a_prompt_that_turns_out_to_be_poison_is_innocent_no_more(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    record.innocent.add(content_of(POISON, "a"))
    record.note_poison([content_of(POISON, "a")])
    assert content_of(POISON, "a") not in record.innocent
    assert refusal_of(record, content_of(POISON, "a")) is not None


def test_innocent_prompts_have_limits():
    prompts = InnocentPrompts(max_prompts=3, max_bytes=40)
    contents = [content_of([index, index]) for index in range(4)]
    for content in contents:
        prompts.add(content)
    assert [content in prompts for content in contents] == [False, True, True, True]
    prompts.add(contents[1])
    prompts.add(content_of(range(6)))
    assert [content in prompts for content in contents] == [False, True, False, True]


def age(folder: Path, incident_id: str, seconds: float) -> None:
    """Have it been found so long ago."""
    [file] = folder.glob(f"quarantine/*/*.{incident_id}")
    *fields, _, _ = file.name.split(".")
    file.rename(file.with_name(".".join((*fields, str(int(time.time() - seconds)), incident_id))))


def test_it_is_forgotten_after_ten_minutes(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    incident_id = record.note_poison([content_of(POISON)])
    age(tmp_path, incident_id, 595)
    assert refusal_of(record, content_of(POISON)) is not None
    age(tmp_path, incident_id, 600)
    assert refusal_of(record, content_of(POISON)) is None
    record.note_poison([content_of([5])])
    assert len(list(tmp_path.glob("quarantine/*/*"))) == 1


def test_the_oldest_makes_room_where_there_are_too_many(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    for index in range(256):
        age(tmp_path, record.note_poison([content_of([index])]), 300 - index)
    record.note_poison([content_of([256])])
    assert len(list(tmp_path.glob("quarantine/*/*"))) == 256
    refused = [index for index in (0, 1, 256) if refusal_of(record, content_of([index])) is not None]
    assert refused == [1, 256]


def test_a_folder_that_cannot_be_written_leaves_each_process_its_own(tmp_path: Path):
    (tmp_path / "quarantine").write_text("no folder")
    record = PoisonRecord(tmp_path)
    incident_id = record.note_poison([content_of(POISON)])
    assert refusal_of(record, content_of(POISON)) is not None
    assert [entry.incident_id for entry in record.entries()] == [incident_id]
    assert record.clear() == 1
    assert refusal_of(record, content_of(POISON)) is None


def test_an_operator_sees_what_is_recorded_and_clears_it(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    first = record.note_poison([content_of(POISON, "a")])
    age(tmp_path, first, 20)
    second = record.note_poison([content_of([1, 2], "b", "other")])
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


@pytest.mark.parametrize("seconds", [599, -30])
def test_what_is_recorded_holds_where_clocks_differ_a_little(tmp_path: Path, seconds: float):
    record = PoisonRecord(tmp_path)
    age(tmp_path, record.note_poison([content_of(POISON)]), seconds)
    assert refusal_of(record, content_of(POISON)) is not None


def test_what_was_recorded_before_the_clock_was_set_back_is_forgotten_and_removed(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    age(tmp_path, record.note_poison([content_of(POISON)]), -3600)
    assert refusal_of(record, content_of(POISON)) is None
    assert list(tmp_path.glob("quarantine/*/*")) == []


def test_files_of_other_names_are_left_alone(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    incident_id = record.note_poison([content_of(POISON)])
    [folder] = tmp_path.glob("quarantine/*")
    for name in (".a.b.c", "poison.a.b.c", "a.b.c.d.e.f"):
        (folder / name).touch()
    assert [entry.incident_id for entry in record.entries()] == [incident_id]
    assert record.clear() == 1
    assert len(list(folder.iterdir())) == 3


def test_a_request_lists_the_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record, listings = PoisonRecord(tmp_path), []
    record.note_poison([content_of(POISON, "a")])
    listdir = os.listdir

    def counted(folder: Path) -> list[str]:
        listings.append(folder)
        return listdir(folder)

    monkeypatch.setattr(os, "listdir", counted)
    assert refusal_of(record, content_of([7], "a")) is not None
    assert len(listings) == 1


def test_a_suspect_runs_alone_in_every_process_until_it_is_cleared(tmp_path: Path):
    first, second = PoisonRecord(tmp_path), PoisonRecord(tmp_path)
    first.note_suspect(content_of(POISON))
    assert second.check(content_of(POISON))
    assert second.check(content_of(POISON, parameters=b"other"))
    assert not second.check(content_of(POISON[:64]))
    assert not second.check(content_of([*POISON, 5]))
    assert second.entries() == []
    second.note_cleared(content_of(POISON))
    assert not first.check(content_of(POISON))


def test_all_of_an_account_with_a_suspect_run_alone_that_are_not_known_to_be_innocent(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    record.innocent.add(content_of([7], "a"))
    for suspect in (content_of(POISON, "a"), content_of([5], "a")):
        record.note_suspect(suspect)
    record.note_cleared(content_of([5], "a"))
    assert record.check(content_of([8], "a"))
    assert not record.check(content_of([7], "a"))
    assert not record.check(content_of([8], "b"))
    record.note_cleared(content_of(POISON, "a"))
    assert not record.check(content_of([8], "a"))


def test_a_prompt_that_was_answered_is_not_known_to_be_innocent_with_other_parameters(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    record.innocent.add(content_of([7], "a", parameters=b"greedy"))
    record.note_poison([content_of(POISON, "a")])
    assert refusal_of(record, content_of([7], "a", parameters=b"greedy")) is None
    assert refusal_of(record, content_of([7], "a", parameters=b"sampled")) is not None


def test_of_several_prompts_of_an_account_none_is_recorded_as_the_cause(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    record.note_poison([content_of([5], "a"), content_of([6], "a")])
    record.innocent.add(content_of([6], "a"))
    assert [entry.num_tokens for entry in record.entries()] == [0]
    assert refusal_of(record, content_of([6], "a")) is None
    assert refusal_of(record, content_of([5], "a")) is not None


def entry(**fields: object) -> add_pb2.AddEntry:
    made = add_pb2.AddEntry(prompt_token_ids=b"\x05\0\0\0", sampling=sampling_pb2.SamplingParams())
    made.MergeFrom(add_pb2.AddEntry(**fields))
    return made


@pytest.mark.parametrize(
    ("changes", "is_equal"),
    [
        ({"request_id": "r", "handle": 3, "request_seed": 9, "attempt": 2, "age_ms": 4}, True),
        ({"sampling": sampling_pb2.SamplingParams(temperature=0.5)}, False),
        ({"adapter": "a"}, False),
    ],
)
def test_requests_have_equal_parameters_where_an_engine_treats_them_alike(changes: dict, is_equal: bool):
    one, other = poison.content_of("", "m", [entry()]), poison.content_of("", "m", [entry(**changes)])
    assert (one == other) == is_equal
    assert one != poison.content_of("", "m", [entry(), entry()])


# What keeps the requests of one process from the suspects of another.

HOLDS_A_LOCK = """
import pathlib, sys
from frontend_svc.generation.poison import ProbationLocks
locks = ProbationLocks(pathlib.Path(sys.argv[1]))
print(getattr(locks, sys.argv[2])(*sys.argv[3:]), flush=True)
sys.stdin.read()
"""


@contextmanager
def other_process(folder: Path, *does: str) -> Iterator[None]:
    """Another process that holds a lock."""
    command = (sys.executable, "-c", HOLDS_A_LOCK, str(folder), *does)
    with running(*command, env=source_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"True\n"
        yield


@pytest.fixture
def quarantine(tmp_path: Path) -> Iterator[PoisonQuarantine]:
    locks = ProbationLocks(tmp_path)
    yield PoisonQuarantine(FakeClock(), locks=locks)
    locks.close()


def suspect_of(prompt: Sequence[int] = POISON, turn: Turn = Turn.ALONE) -> Suspect:
    suspect = Suspect(content_of(prompt))
    suspect.turn = turn
    return suspect


ENGINES = ["a", "b", "c"]


def may_go(quarantine: PoisonQuarantine, suspect: Suspect, address: str) -> bool:
    return quarantine.may_go(suspect, address, lambda: ENGINES)


@pytest.mark.parametrize("turn", list(Turn))
def test_no_request_goes_where_another_process_has_a_suspect_alone(
    tmp_path: Path, quarantine: PoisonQuarantine, turn: Turn
):
    suspect = suspect_of(turn=turn)
    with other_process(tmp_path, "have_alone", "a", "owner"):
        assert not may_go(quarantine, suspect, "a")
        assert quarantine.is_locked_out
        assert may_go(quarantine, suspect, "b")
        # Where the other one was faster.
        assert not quarantine.send(suspect, "a", yields_at=0.0)
        assert suspect.engine is None
    assert may_go(quarantine, suspect, "a")
    assert quarantine.send(suspect, "a", yields_at=0.0)


def test_a_suspect_waits_for_requests_of_another_process_without_output(
    tmp_path: Path, quarantine: PoisonQuarantine
):
    suspect = suspect_of()
    with other_process(tmp_path, "share", "a"):
        assert not may_go(quarantine, suspect, "a")
        assert may_go(quarantine, suspect_of([5], Turn.AT_ONCE), "a")
        quarantine.reserve(suspect, ["a"])
        assert not may_go(quarantine, suspect_of([5], Turn.AT_ONCE), "a")
    assert may_go(quarantine, suspect, "a")


def test_an_owner_has_no_two_engines_in_two_processes(tmp_path: Path, quarantine: PoisonQuarantine):
    suspect = suspect_of()
    with other_process(tmp_path, "have_alone", "a", suspect.owner):
        assert not may_go(quarantine, suspect, "b")
        assert may_go(quarantine, suspect_of([5]), "b")
    assert may_go(quarantine, suspect, "b")


ASKS = """
import pathlib, sys
from frontend_svc.generation.poison import ProbationLocks
locks = ProbationLocks(pathlib.Path(sys.argv[1]))
print(locks.have_alone("a", "other owner"), flush=True)
"""


def is_free_elsewhere(folder: Path) -> bool:
    """Whether another process can have engine a alone."""
    with running(
        sys.executable, "-c", ASKS, str(folder), env=source_environment(), stdout=subprocess.PIPE
    ) as asker:
        assert asker.stdout is not None
        return asker.stdout.readline() == b"True\n"


def test_an_engine_is_free_for_other_processes_once_nothing_is_on_it(
    tmp_path: Path, quarantine: PoisonQuarantine
):
    first, second = suspect_of(), suspect_of([5])
    quarantine.send(first, "a", yields_at=0.0)
    # Slow for another reason, and so the next has its turn.
    quarantine.pass_over(first)
    quarantine.send(second, "a", yields_at=0.0)
    quarantine.clear(first)
    assert not is_free_elsewhere(tmp_path)
    quarantine.clear(second)
    assert is_free_elsewhere(tmp_path)


def test_one_that_ends_does_not_release_what_the_next_process_of_its_engine_has(
    tmp_path: Path, quarantine: PoisonQuarantine
):
    old, new = suspect_of(), suspect_of([5])
    quarantine.send(old, "a", yields_at=0.0)
    quarantine.lose_engine("a", is_dead=False)
    quarantine.send(new, "a", yields_at=0.0)
    quarantine.remove(old)
    assert not is_free_elsewhere(tmp_path)


def test_none_is_the_cause_where_another_process_had_requests_on_the_engine(
    tmp_path: Path, quarantine: PoisonQuarantine
):
    slow = suspect_of()
    quarantine.send(slow, "a", yields_at=0.0)
    quarantine.pass_over(slow)
    with other_process(tmp_path, "share", "a"):
        quarantine.lose_engine("a", is_dead=True)
    assert slow.incident_id == ""


def test_other_processes_see_for_a_while_that_requests_were_on_a_dead_engine(
    tmp_path: Path, quarantine: PoisonQuarantine
):
    quarantine.send(suspect_of(turn=Turn.AT_ONCE), "a", yields_at=0.0)
    quarantine.lose_engine("a", is_dead=True)
    assert not is_free_elsewhere(tmp_path)
    quarantine.release("a")
    assert is_free_elsewhere(tmp_path)


def test_a_folder_that_has_not_changed_is_not_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record, other = PoisonRecord(tmp_path), PoisonRecord(tmp_path)
    incident_id = record.note_poison([content_of(POISON)])
    later_ns = time.time_ns() + 5_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: later_ns)
    assert refusal_of(record, content_of(POISON)) is not None
    with monkeypatch.context() as without:
        without.delattr(os, "listdir")
        assert refusal_of(record, content_of(POISON)) is not None
    assert other.clear(incident_id) == 1
    assert refusal_of(record, content_of(POISON)) is None
