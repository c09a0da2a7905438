"""A client that floods a coordinator with reports at a set rate, for `rig.outage`.

Prints as JSON how many messages it sent, how often it was cut off, and with which statuses.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator

from triptych_kit.process.setup import prepare_process

prepare_process("client")

import grpc  # noqa: E402

from triptych.coordinator.v1 import coordinator_pb2, coordinator_pb2_grpc, member_pb2  # noqa: E402

# Reports between two looks at the clock.
_BATCH = 100


class Flood:
    """Sends at a rate until a deadline; a session that is cut off is followed by the next at once.

    Not by asyncio: there, a write that fails as the session ends takes the place of the status that it has
    ended with (https://github.com/grpc/grpc/issues/36066).
    """

    def __init__(self, address: str, *, rate: float, seconds: float) -> None:
        self.num_sent = 0
        self.num_sessions = 0
        self.statuses: Counter[str] = Counter()
        self._address = address
        self._rate = rate
        self._began_at = time.monotonic()
        self._ends_at = self._began_at + seconds

    def run(self) -> None:
        with grpc.insecure_channel(self._address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            while time.monotonic() < self._ends_at:
                self.num_sessions += 1
                try:
                    for _ in stub.EngineSession(self._messages()):
                        pass
                except grpc.RpcError as error:
                    self.statuses[error.code().name] += 1

    def _messages(self) -> Iterator[coordinator_pb2.EngineSessionRequest]:
        # An engine that cannot be reached, though frontends will try, in a group of its own.
        registration = member_pb2.EngineRegistration(
            engine_id="flood", engine_epoch=1, dp_group="flood", dp_size=1, endpoint="127.0.0.1:9"
        )
        yield coordinator_pb2.EngineSessionRequest(register=registration)
        while time.monotonic() < self._ends_at:
            for _ in range(_BATCH):
                self.num_sent += 1
                report = coordinator_pb2.EngineReport(
                    seq=self.num_sent, state=member_pb2.MEMBER_STATE_LOADING, step_number=self.num_sent
                )
                yield coordinator_pb2.EngineSessionRequest(report=report)
            ahead_s = self.num_sent / self._rate - (time.monotonic() - self._began_at)
            time.sleep(max(0.0, ahead_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--rate", type=float, default=10_000.0, help="messages a second")
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    flood = Flood(arguments.address, rate=arguments.rate, seconds=arguments.seconds)
    flood.run()
    counts = {
        "num_sent": flood.num_sent,
        "num_sessions": flood.num_sessions,
        "statuses": dict(flood.statuses),
    }
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
