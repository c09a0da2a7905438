"""What only a few files may do: read the environment, catch everything, deserialize the unsafe way."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.sources import Source, package_sources

MAY_READ_THE_ENVIRONMENT = {"triptych_kit/config.py", "triptych_kit/process/setup.py"}

# Where the last line of defence is, where an error is passed to a wait in another thread, where a library
# raises bare Exceptions for bad data, where an error must not hide another, or where a stranger's code runs.
MAY_CATCH_EVERYTHING = {
    "triptych_kit/http/admin_http.py",
    "triptych_kit/http/pages.py",
    "triptych_kit/interceptors.py",
    # One metric that cannot be read must not hide the others.
    "triptych_kit/telemetry/metrics.py",
    "triptych_kit/plugins.py",
    # The tokenizers library has no exception class of its own.
    "engine_svc/model/loading/gguf/folder.py",
    "engine_svc/loop/answer.py",
    "engine_svc/loop/engine.py",
    "engine_svc/process/engine_thread.py",
    "engine_svc/loop/recovery.py",
    "engine_svc/loop/requests.py",
    "engine_svc/runner/executor.py",
    # What a feature raises ends the requests that use it.
    "engine_svc/runner/feature.py",
    "engine_svc/scheduler/feature.py",
    "engine_svc/runner/preparer.py",
    "engine_svc/runner/running_step.py",
    "engine_svc/ranks/loop.py",
    "engine_svc/ranks/watch.py",
    "engine_svc/session/session.py",
    "engine_svc/session/requests.py",
    "frontend_svc/text/detokenizer.py",
    "frontend_svc/engines/artifacts.py",
    "frontend_svc/engines/connection/client.py",
    "frontend_svc/engines/connection/requests.py",
    "frontend_svc/engines/coordinator.py",
    "frontend_svc/text/workers/process.py",
    # Decoders of damaged images raise almost anything.
    "frontend_svc/media/processing/decode.py",
    # Every call over HTTP gets an answer.
    "frontend_svc/protocols/openai/call.py",
    "triptych_cli/serve/group_follower.py",
    "triptych_conformance/report.py",
}
# Objects of other projects, whose members depend on their versions.
MAY_READ_BY_NAME = {
    "engine_svc/model", "engine_svc/ranks/state_digest.py", "frontend_svc/text/workers/workers.py",
    "triptych_cli/cli.py", "triptych_kit/interceptors.py", "triptych_kit/process/setup.py",
    "triptych_kit/security/credentials.py", "triptych_kit/shared_memory.py",
    "triptych_cli/verbs/completion.py", "frontend_svc/media/processing/decode.py",
}  # fmt: skip
# What the engine measures and waits for; all else gets the time, and noise, as an argument.
ENGINE_MAY_READ_A_CLOCK = {
    "engine_svc/build/rank_main.py", "engine_svc/features/sched_trace/scheduler.py",
    "engine_svc/features/structured_output/backends/llguidance_backend.py",
    "engine_svc/features/structured_output/grammars.py", "engine_svc/features/structured_output/runner.py",
    "engine_svc/model/loading/loader.py", "engine_svc/model/loading/packed_weights.py",
    "engine_svc/ranks/plan_channel.py", "engine_svc/ranks/process_group.py", "engine_svc/ranks/watch.py",
    "engine_svc/runner/preparer.py", "engine_svc/runner/step_costs.py",
}  # fmt: skip
# Files with a queue that is bounded by something else, and by what.
LIMITED_OTHERWISE = {
    "engine_svc/features/sched_trace/file.py": "ends where the disk is slower than the engine",
    "engine_svc/loop/mailbox.py": "counts commands, and refuses an Add when it is full",
    "engine_svc/ranks/loop.py": "steps in flight",
    "engine_svc/ranks/watch.py": "an answer of each rank to one call",
    "engine_svc/runner/executor.py": "steps in flight",
    "triptych_kit/server.py": "signals of an operator",
    "triptych_cli/engines/in_process.py": "messages of the one client in the same process",
    "triptych_cli/offline/session.py": "an input and the answer to it: turns follow one another",
    "triptych_client/aio_waiting.py": "inputs of one session, of which a frontend takes 64 ahead",
    "triptych_client/waiting.py": "inputs of one session, of which a frontend takes 64 ahead",
}
QUEUES = {"Queue", "LifoQueue", "PriorityQueue", "SimpleQueue"}
UNSAFE_CALLS = {"eval", "exec", "pickle.load", "pickle.loads", "marshal.loads", "yaml.load", "os.system"}


def test_the_environment_has_two_doors() -> None:
    readers = {source.path for source in package_sources() if _reads_environment(source)}
    assert readers - MAY_READ_THE_ENVIRONMENT == set()


def test_only_few_handlers_catch_everything() -> None:
    hits = [
        f"{source.path}:{handler.lineno}"
        for source in package_sources()
        if source.path not in MAY_CATCH_EVERYTHING
        for handler in _handlers_of_everything(source)
    ]
    assert hits == []


def test_nothing_that_arrives_is_unpickled_or_evaluated() -> None:
    hits = []
    for source in package_sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
                hits.append(f"{source.path}:{node.lineno}")
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                is_off = isinstance(node.value, ast.Constant) and node.value.value is False
                hits += [] if is_off else [f"{source.path}:{node.value.lineno}"]
    assert hits == []


def test_no_member_of_an_own_object_is_read_by_a_literal_name() -> None:
    hits = []
    for source in package_sources():
        for node in ast.walk(source.tree):
            match node:
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(), *_]):
                    hits += [] if source.is_in(*MAY_READ_BY_NAME) else [f"{source.path}:{node.lineno}"]
    assert hits == []


def test_no_function_changes_a_global() -> None:
    hits = [
        f"{source.path}:{node.lineno}"
        for source in package_sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Global)
    ]
    assert hits == []


def test_the_engine_gets_the_time_and_noise_as_arguments() -> None:
    readers = {
        source.path
        for source in package_sources()
        for node in ast.walk(source.tree)
        if source.is_in("engine_svc") and isinstance(node, ast.Import)
        if {"time", "random"} & {alias.name for alias in node.names}
    }
    assert readers == ENGINE_MAY_READ_A_CLOCK


def test_every_queue_has_a_limit() -> None:
    without = {
        source.path
        for source in package_sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and not node.args and not node.keywords
        if ast.unparse(node.func).split(".")[-1] in QUEUES
    }
    assert without == LIMITED_OTHERWISE.keys()


def test_the_runner_calls_its_drafting_without_asking_whether_there_is_any() -> None:
    hits = [
        f"{source.path}:{node.lineno}"
        for source in package_sources()
        for node in ast.walk(source.tree)
        if source.is_in("engine_svc/runner") and isinstance(node, ast.Compare)
        if "drafting" in ast.unparse(node.left)
    ]
    assert hits == []


def _reads_environment(source: Source) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os")
        for node in ast.walk(source.tree)
    )


def _handlers_of_everything(source: Source) -> Iterator[ast.ExceptHandler]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = "everything" if node.type is None else ast.unparse(node.type)
        # Code that cleans up and raises again hides nothing.
        raises_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if caught in ("everything", "Exception", "BaseException") and not raises_again:
            yield node
