"""What must hold after a fault, read off what clients, processes and logs have to show. Knows no fault.

How long things take is measured by `python -m benchmarks chaos`, on a machine that does nothing else. The
limits of time are so wide here that what is late has not worked at all, or in another way than it should.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence

import grpc

from benchmarks.report import percentile
from benchmarks.rig.history import num_repeats, outputs_of
from benchmarks.rig.processes import ServiceProcess, log_instant
from benchmarks.rig.streams import StreamRecord
from benchmarks.rig.watch import moved_requests, stale_outputs
from tests.chaos.scene import Check, Scene
from triptych.common.v1 import output_pb2

_MAX_SHOWN = 5
_SLOW_SCALE = 1.5


async def is_clean(scene: Scene) -> list[str]:
    """No stream but the marked one has an error, a gap, a repeat or a difference."""
    violations = scene.oracle.violations(scene.unmarked)
    streams = {violation.request_id for violation in violations}
    shown = [str(violation) for violation in violations[:_MAX_SHOWN]]
    repeats = num_repeats(scene.unmarked)
    if repeats:
        shown.append(f"{repeats} messages came twice")
    return [f"{len(streams)} of {len(scene.unmarked)} streams are not clean", *shown] if shown else []


def is_detected_within(limit_s: float) -> Check:
    """The frontend stops to call the struck engine ready so soon, by its log."""

    async def check(scene: Scene) -> list[str]:
        since, address = scene.wall_instants["struck"], scene.stack.route_of(scene.engines[0])
        instants = [
            log_instant(record)
            for record in scene.frontend.log_records()
            if record.get("msg") == "engine state"
            and record.get("engine") == address
            and record.get("state") != "ready"
            and log_instant(record) >= since - 0.001
        ]
        if not instants:
            return ["the frontend never noticed"]
        scene.notes["detected_s"] = instants[0] - since
        return _late("detection", scene.notes["detected_s"], limit_s, scene)

    return check


def is_recovered_within(limit_s: float, *, after: str = "struck") -> Check:
    """The streams of the struck engine are silent for no longer afterwards, at the 99th percentile."""

    async def check(scene: Scene) -> list[str]:
        times = _silences(scene.on_victim, scene.instants[after])
        scene.notes["silent_p99_s"] = percentile(times, 99)
        return _late("silence p99", scene.notes["silent_p99_s"], limit_s, scene)

    return check


def exits_with(*statuses: int, index: int = 0) -> Check:
    """An engine that the scenario made end did so with one of these."""

    async def check(scene: Scene) -> list[str]:
        status = scene.notes.get(f"exit_status_{index}")
        return [] if status in statuses else [f"the engine ended with {status}, expected {statuses}"]

    return check


def logs(pattern: str, *, index: int = 0) -> Check:
    """An engine's output, in any of its lives, has this."""

    async def check(scene: Scene) -> list[str]:
        text = scene.engines[index].log_file.read_text(errors="replace")
        return [] if re.search(pattern, text) else [f"no {pattern!r} in the output of engine-{index}"]

    return check


async def has_stale_outputs(scene: Scene) -> list[str]:
    """The engine that came back sent outputs of requests that had moved: the test bit."""
    address = scene.stack.route_of(scene.engines[0])
    scene.notes["stale_outputs"] = await stale_outputs(scene.frontend, address)
    return [] if scene.notes["stale_outputs"] else ["no stale output was counted"]


async def all_engines_are_the_same(scene: Scene) -> list[str]:
    started = {engine.name: engine.num_starts for engine in scene.engines if not engine.is_running}
    return [f"engines ended: {started}"] if started else []


async def poison_request_ends_with_error(scene: Scene) -> list[str]:
    """The marked stream ends with finish reason ERROR and OK, or with INTERNAL."""
    record = scene.marked
    reasons = [output.reason for output in outputs_of(record)]
    is_error = record.code is grpc.StatusCode.OK and reasons == [output_pb2.FINISH_REASON_ERROR]
    if is_error or record.code is grpc.StatusCode.INTERNAL:
        return []
    return [f"the poisonous request ended with {record.code} {record.details!r}, reasons {reasons}"]


async def poison_request_is_quarantined(scene: Scene) -> list[str]:
    """The marked stream ends with INTERNAL, which says why."""
    record = scene.marked
    if record.code is grpc.StatusCode.INTERNAL and record.reason == "QUARANTINED":
        return []
    return [f"the poisonous request ended with {record.code}, {record.reason}: {record.details}"]


async def marked_request_is_clean(scene: Scene) -> list[str]:
    """The marked stream says what it would have said undisturbed."""
    return [str(violation) for violation in scene.oracle.violations([scene.marked])]


async def requests_moved(scene: Scene) -> list[str]:
    """Streams of the struck engine went on elsewhere: else nothing was shown."""
    moved = await moved_requests(scene.frontend) - scene.notes.get("moved_before", 0)
    scene.notes["moved"] = moved
    return [] if moved else ["no request moved"]


async def no_request_moved(scene: Scene) -> list[str]:
    moved = await moved_requests(scene.frontend) - scene.notes.get("moved_before", 0)
    return [f"{moved:g} requests moved"] if moved else []


def noted(name: str, *, at_most: float, is_time: bool = False) -> Check:
    """A number that the scenario measured is no larger; one of time is scaled."""

    async def check(scene: Scene) -> list[str]:
        value = scene.notes[name]
        limit = at_most * (scene.calibration.scale if is_time else 1.0)
        return [] if value <= limit else [f"{name} is {value:.3f}, at most {limit:.3f}"]

    return check


def restarts_at_most(count: int, *, on_slow_machine: int) -> Check:
    """Engines ended so often, all of them together.

    on_slow_machine: where a request may wait for its first output for longer than others wait for a suspect.
    """

    async def check(scene: Scene) -> list[str]:
        number = sum(engine.num_starts for engine in scene.engines) - scene.notes["starts_before"]
        scene.notes["engine_deaths"] = number
        limit = on_slow_machine if scene.calibration.scale > _SLOW_SCALE else count
        return [] if number <= limit else [f"engines ended {number:g} times, at most {limit}"]

    return check


async def prompt_tokens(engines: list[ServiceProcess]) -> float:
    """Prompt tokens that engines were given since they started."""
    return sum([float((await engine.status())["prompt_tokens"]) for engine in engines])


def _silences(records: Sequence[StreamRecord], since: float) -> list[float]:
    """Of each stream, the longest time without tokens that ends after an instant.

    Not when it ends: where a fault costs less than what is usual, that is anywhere in the rest of the stream.
    """
    found = []
    for record in records:
        at = [record.sent_at, *record.token_instants, record.ended_at or time.monotonic()]
        found.append(max(later - earlier for earlier, later in itertools.pairwise(at) if later >= since))
    return found


def _late(what: str, seconds: float, limit_s: float, scene: Scene) -> list[str]:
    limit = limit_s * scene.calibration.scale
    return [] if seconds <= limit else [f"{what} took {seconds:.3f} s, at most {limit:.3f} s"]
