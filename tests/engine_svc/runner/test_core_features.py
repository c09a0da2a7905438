"""A parameter that frontends pass on unread has a reader: the engine's core or a stage of the runner."""

from __future__ import annotations

from dataclasses import fields

import torch

from engine_svc.core.extras import Parameters
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import AdmittedRequest
from engine_svc.runner.core_features import with_core_features
from engine_svc.runner.feature import RunnerContext
from triptych.common.v1 import sampling_pb2
from triptych_kernels import REFERENCE
from triptych_kit.rules import passed_on_fields

CONTEXT = RunnerContext(None, torch.device("cpu"), torch.float32, 50, 4, REFERENCE, torch.zeros(4, 8))


def test_a_parameter_that_is_passed_on_is_read():
    stages = with_core_features([], CONTEXT)
    unread = set(passed_on_fields(sampling_pb2.SamplingParams)) - {
        field.name for field in fields(SamplingParams)
    }
    for name in list(unread):
        extras = {Parameters: Parameters(((name, 1.0),))}
        admitted = AdmittedRequest("a", [1], 1, SamplingParams(max_tokens=1), [[]], extras)
        if any(stage.uses(admitted) for stage in stages):
            unread.remove(name)
    assert unread == set()
