"""Each state machine is an Enum, a table of transitions and one `move_to`; a wrong move raises."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

import pytest

from tests.architecture.sources import Source, package_sources

MACHINES = {
    "coordinator_svc/data_parallel/formation.py": "Phase",
    "coordinator_svc/membership/registry.py": "MemberState",
    "coordinator_svc/scaling/operation.py": "OperationState",
    "engine_svc/admin/lifecycle.py": "EngineState",
    "engine_svc/core/request.py": "RequestStatus",
    "engine_svc/data_parallel/wave.py": "LockstepState",
    "engine_svc/loop/pause.py": "RunState",
    "engine_svc/runner/sleep.py": "Location",
    "frontend_svc/engines/connection/client.py": "EngineState",
    "frontend_svc/protocols/openai/response_events.py": "ResponseStatus",
    "frontend_svc/text/workers/slot.py": "SlotState",
    "triptych_kit/server.py": "ServiceState",
}


def test_the_list_is_complete() -> None:
    with_table = {source.path for source in package_sources() if "TRANSITIONS" in source.text}
    assert with_table == MACHINES.keys()


@pytest.mark.parametrize("path", MACHINES)
def test_the_table_has_every_state(path: str) -> None:
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    states = getattr(module, MACHINES[path])
    assert set(module._TRANSITIONS) == set(states)
    assert {state for following in module._TRANSITIONS.values() for state in following} <= set(states)


@pytest.mark.parametrize("path", MACHINES)
def test_one_function_moves_and_refuses_a_wrong_move(path: str) -> None:
    (source,) = (source for source in package_sources() if source.path == path)
    (move,) = (function for function in functions(source) if function.name.strip("_") == "move_to")
    body = ast.unparse(move)
    assert "_TRANSITIONS[" in body
    assert "raise InvalidTransition(" in body
    assert list(direct_moves(source, MACHINES[path])) == []


def functions(source: Source) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef))


def direct_moves(source: Source, states: str) -> Iterator[str]:
    """Assignments of a state to what holds it, but in a constructor."""
    holders = ("state", "status", "phase")
    for function in functions(source):
        if function.name == "__init__":
            continue
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=[ast.Attribute(attr=name)], value=ast.Attribute() as state):
                    if name.strip("_") in holders and ast.unparse(state).startswith(f"{states}."):
                        yield f"{source.path}:{node.lineno}"
