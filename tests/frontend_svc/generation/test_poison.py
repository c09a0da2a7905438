"""What frontend processes of one host share: the requests that crashed engines, and turns on an engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from frontend_svc.generation.poison import PoisonRecord, ProbationLocks, content_of
from frontend_svc.generation.suspects import PoisonQuarantine, Suspect
from frontend_svc.output.loss import LossKind
from tests.processes import running, source_environment
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.errors import Internal


def add_entry(**changes: object) -> add_pb2.AddEntry:
    entry = add_pb2.AddEntry(
        request_id="made here",
        external_request_id="the client's",
        prompt_token_ids=b"\5\0\0\0",
        sampling=sampling_pb2.SamplingParams(max_tokens=8, temperature=0.5),
        request_seed=3,
    )
    entry.MergeFrom(add_pb2.AddEntry(**changes))
    return entry


def refusal_of(record: PoisonRecord, content: str) -> Internal | None:
    try:
        record.check(lambda: content)
    except Internal as error:
        return error
    return None


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": "again"},
        {"external_request_id": "another"},
        {"request_seed": 4},
        {"priority": 1},
        {"cache_salt": "another"},
        {"age_ms": 9, "remaining_ms": 10, "attempt": 2},
        {"output_token_ids": b"\1\0\0\0"},
        {"orphan_grace_ms": 5, "resume_state": b"x"},
        {"trace_context": add_pb2.TraceContext(traceparent="00-1-2-01")},
    ],
)
def test_a_request_that_is_sent_again_has_the_same_content(changes):
    assert content_of("m", [add_entry(**changes)]) == content_of("m", [add_entry()])


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": b"\6\0\0\0"},
        {"sampling": sampling_pb2.SamplingParams(max_tokens=9)},
        {"sampling": sampling_pb2.SamplingParams(temperature=0.6)},
        {"tenant": "another"},
        {"bad_words": [add_pb2.TokenSequence(token_ids=b"\7\0\0\0")]},
    ],
)
def test_another_prompt_parameter_or_tenant_is_other_content(changes):
    assert content_of("m", [add_entry(**changes)]) != content_of("m", [add_entry()])


def test_another_model_number_of_outputs_or_seed_of_the_client_is_other_content():
    entry = add_entry()
    contents = {
        content_of("m", [entry]),
        content_of("other", [entry]),
        content_of("m", [entry, entry]),
        content_of("m", [entry], 3),
        content_of("m", [entry], 4),
    }
    assert len(contents) == 5


def test_a_recorded_request_is_refused_with_its_incident_by_every_process_and_no_other_is(tmp_path: Path):
    incident_id = PoisonRecord(tmp_path).add("poison")
    later = PoisonRecord(tmp_path)
    refusal = refusal_of(later, "poison")
    assert refusal is not None
    assert refusal.reason == "QUARANTINED"
    assert refusal.metadata == {"incident_id": incident_id}
    assert incident_id in refusal.message
    assert refusal_of(later, "neighbour") is None


def test_content_is_not_computed_where_nothing_is_recorded(tmp_path: Path):
    def never() -> str:
        raise AssertionError

    PoisonRecord(tmp_path).check(never)
    PoisonRecord().check(never)


def age(folder: Path, content: str, seconds: float) -> None:
    [file] = (folder / "quarantine").glob(f"{content}.*")
    at = time.time() - seconds
    os.utime(file, (at, at))


def test_it_is_forgotten_after_ten_minutes(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    record.add("poison")
    age(tmp_path, "poison", 595)
    assert refusal_of(record, "poison") is not None
    age(tmp_path, "poison", 600)
    assert refusal_of(record, "poison") is None
    record.add("another")
    assert len(list((tmp_path / "quarantine").iterdir())) == 1


def test_the_oldest_makes_room_where_there_are_too_many(tmp_path: Path):
    record = PoisonRecord(tmp_path)
    for index in range(256):
        record.add(f"{index}")
        age(tmp_path, f"{index}", 300 - index)
    record.add("last")
    assert len(list((tmp_path / "quarantine").iterdir())) == 256
    assert refusal_of(record, "0") is None
    assert refusal_of(record, "1") is not None
    assert refusal_of(record, "last") is not None


def test_a_folder_that_cannot_be_written_loses_the_record_and_nothing_else(tmp_path: Path):
    (tmp_path / "quarantine").write_text("no folder")
    record = PoisonRecord(tmp_path)
    assert record.add("poison")
    assert refusal_of(record, "poison") is None


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
    assert suspects.may_go(suspect, "a")
    command = (sys.executable, "-c", HOLDS_A_LOCK, str(tmp_path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with running(*command, env=source_environment(), **pipes) as other:
        assert other.stdout is not None and other.stdout.readline() == b"True\n"
        assert not suspects.may_go(suspect, "a")
        assert suspects.is_locked_out
        assert suspects.may_go(suspect, "b")
        # Where it is sent there in spite of that, it is not found to be the cause.
        suspects.send(suspect, "a")
        assert not suspects.lose(suspect, "a", LossKind.DEATH, had_output=False)
    assert suspects.may_go(suspect, "a")
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
