"""Cases about requests that an engine keeps, and about those that have moved away from one."""

from __future__ import annotations

from triptych.engine.v1 import add_pb2, engine_pb2
from triptych_conformance.cases import Cases, NotApplicable, Section, expect
from triptych_conformance.frontend.health import busy
from triptych_conformance.frontend_under_test import FrontendUnderTest
from triptych_kit.rules import rules_of

CASES: Cases[FrontendUnderTest] = Cases(Section.ADOPTION)

_GRACE_MS = 1000
_MAX_GRACE_MS = int(rules_of(add_pb2.AddEntry, "orphan_grace_ms").lowered_to)
_MAX_STATE_BYTES = rules_of(add_pb2.AddEntry, "resume_state").max_bytes
_LEAST_ID_CHARACTERS = 32


@CASES.must(
    "A request that others may adopt has a request_id that cannot be guessed, and 64 KiB of state at most."
)
async def request_to_adopt(frontend: FrontendUnderTest) -> None:
    for engine in frontend.engines:
        await engine.restart(features=("resume", "adopt"))
    await frontend.until_used(*frontend.engines)
    attempt = await frontend.attempt_of(frontend.generate(orphan_grace_ms=_GRACE_MS))
    entry = attempt.entry
    if not entry.resume_state:
        raise NotApplicable("the frontend sends no resume_state")
    expect(
        "adopt" in attempt.session.features, "resume_state with the feature adopt alone", entry.resume_state
    )
    size_bytes, length = len(entry.resume_state), len(entry.request_id)
    expect(size_bytes <= _MAX_STATE_BYTES, f"resume_state of {_MAX_STATE_BYTES} bytes at most", size_bytes)
    expect(entry.orphan_grace_ms <= _MAX_GRACE_MS, f"{_MAX_GRACE_MS} ms at most", entry.orphan_grace_ms)
    expect(length >= _LEAST_ID_CHARACTERS, f"a request_id of {_LEAST_ID_CHARACTERS} characters", length)


@CASES.must(
    "A request that moved from a hung engine is aborted there with MIGRATED; the engine is used again."
)
async def moved_request(frontend: FrontendUnderTest) -> None:
    call = frontend.generate(4)
    attempt = await frontend.attempt_of(call)
    attempt.send([5, 6], is_first=True)
    await frontend.until_tokens(call, 2)
    attempt.engine.change(heartbeat=busy(step_number=3, age_ms=60_000, budget_ms=100))
    later = await frontend.attempt_of(call, after=attempt)
    attempt.engine.change(heartbeat=busy(step_number=4, age_ms=0, budget_ms=5000))
    aborts, handle = attempt.session.aborts, attempt.entry.handle
    await frontend.until(lambda: handle in dict(aborts), "abort of the request that moved")
    reason = dict(aborts)[handle]
    expect(reason == engine_pb2.ABORT_REASON_MIGRATED, "reason MIGRATED", reason)
    attempt.session.abort(handle)
    later.send([7, 8], is_first=True, ends=True)
    await frontend.must_finish(call, [5, 6, 7, 8])
    await frontend.until_used(attempt.engine)
