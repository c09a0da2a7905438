from __future__ import annotations

import threading

import pytest

from engine_svc.core.errors import DeviceLost
from launcher.engines.core_client import EngineDead, no_rows
from service_kit.errors import InvalidArgument, ResourceExhausted, Unimplemented
from tests.engine_svc.fakes import FakeExecutor
from tests.engine_svc.session.service_rig import make_entry
from tests.launcher.engines.rig import Gathered, answer_of, in_process_client
from triptych.common.v1 import output_pb2
from triptych.engine.v1 import engine_pb2

CLIENT = engine_pb2.ABORT_REASON_CLIENT


def finish(client, gathered: Gathered | None = None) -> Gathered:
    gathered = gathered or Gathered()
    while client.num_in_flight:
        gathered.take(client.get_output().columns)
    return gathered


def test_a_request_completes_without_a_thread() -> None:
    threads = set(threading.enumerate())
    client = in_process_client()
    handle = client.add(make_entry(3))
    gathered = finish(client)
    assert gathered.tokens == {handle: answer_of(3)}
    # Threads of other tests may end meanwhile.
    assert set(threading.enumerate()) <= threads


def test_nothing_is_computed_but_in_get_output() -> None:
    executor = FakeExecutor()
    client = in_process_client(executor)
    client.add(make_entry(1))
    assert executor.num_launched == 0
    client.get_output()
    assert executor.num_launched > 0


def test_many_requests_share_steps() -> None:
    executor = FakeExecutor()
    client = in_process_client(executor)
    handles = {client.add(make_entry(number)): number for number in range(1, 41)}
    gathered = finish(client)
    assert gathered.tokens == {handle: answer_of(number) for handle, number in handles.items()}
    assert executor.num_launched < 40 * 5


def test_an_output_without_requests_has_no_rows() -> None:
    assert list(in_process_client().get_output().columns.handles) == []


def test_an_aborted_request_ends_once_and_the_others_go_on() -> None:
    client = in_process_client()
    first, second = client.add(make_entry(1, max_tokens=50)), client.add(make_entry(2))
    gathered = Gathered()
    gathered.take(client.get_output().columns)
    client.abort([first, 999], CLIENT)
    finish(client, gathered)
    assert gathered.ended == {first, second}
    assert len(gathered.tokens[first]) < 50
    assert gathered.tokens[second] == answer_of(2)


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (make_entry(1, prompt=[5] * 200), InvalidArgument),
        (make_entry(1, prompt=[100_000]), InvalidArgument),
        (make_entry(1, temperature=-1.0), InvalidArgument),
    ],
)
def test_what_is_wrong_is_refused_and_leaves_nothing(entry, error) -> None:
    client = in_process_client()
    with pytest.raises(error):
        client.add(entry)
    assert client.num_in_flight == 0


def test_an_adapter_is_refused_by_name() -> None:
    entry = make_entry(1)
    entry.adapter = "mine"
    with pytest.raises(Unimplemented, match="adapter"):
        in_process_client().add(entry)


def test_more_requests_than_a_session_takes_are_refused() -> None:
    client = in_process_client(max_commands=3)
    handles = [client.add(make_entry(number)) for number in range(1, 4)]
    with pytest.raises(ResourceExhausted, match="full"):
        client.add(make_entry(4))
    assert finish(client).ended == set(handles)


def test_the_loss_of_the_device_is_raised_as_it_is_and_the_engine_is_dead_then() -> None:
    def fail(plan) -> None:
        if plan.request_ids:
            raise DeviceLost("in the step")

    client = in_process_client(FakeExecutor(fail))
    client.add(make_entry(1))
    with pytest.raises(DeviceLost):
        client.get_output()
    for call in (client.get_output, lambda: client.add(make_entry(2)), lambda: client.abort([1], CLIENT)):
        with pytest.raises(EngineDead, match="broken off"):
            call()


def test_closing_frees_the_device_once_and_ends_the_client() -> None:
    executor = FakeExecutor()
    client = in_process_client(executor)
    client.add(make_entry(1))
    client.close()
    client.close()
    assert executor.is_shut_down
    assert client.num_in_flight == 0
    with pytest.raises(EngineDead, match="closed"):
        client.add(make_entry(2))


def test_a_stop_token_of_the_request_is_told_apart_from_the_models_own() -> None:
    client = in_process_client()
    handle = client.add(make_entry(3, stop_token_ids=[answer_of(3)[1]]))
    columns = no_rows()
    while client.num_in_flight:
        columns = client.get_output().columns
    ending = columns.endings[list(columns.handles).index(handle)]
    assert ending.stop_token_id == answer_of(3)[1]
    assert ending.eos_token_id is None
    assert output_pb2.FinishReason.Name(output_pb2.FINISH_REASON_STOP).endswith(ending.reason.name)
