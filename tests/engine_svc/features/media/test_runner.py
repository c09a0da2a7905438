"""Prompts with pictures yield what transformers' own model yields, however they are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine_svc.features.media.extras import EncoderWork, MediaItems, RowItems
from engine_svc.features.media.runner import EncodedRows
from engine_svc.model.loading.loader import LoadOptions, load_model
from tests.engine_svc.features.media.pictures import make_llava, picture, prompt_with
from tests.engine_svc.runner.conftest import TinyModel
from tests.engine_svc.runner.fakes import PlanDriver
from tests.engine_svc.runner.test_model_runner import run_in_random_steps

NUM_TOKENS = 12
PROMPTS = {
    "none": [5, 6, 7, 8],
    "first": [picture(1), 9, 10],
    "two": [3, picture(2), 4, picture(3), 5],
    "same twice": [picture(2), 4, picture(2), 7, 11],
    "last": [20, 21, 22, picture(4)],
}


class Counted:
    """The encoder of a model, with the number of its calls."""

    def __init__(self, encoder) -> None:
        self._encoder = encoder
        self.num_calls = 0

    def encode(self, inputs: dict[str, Tensor]) -> Tensor:
        self.num_calls += 1
        return self._encoder.encode(inputs)


@pytest.fixture(scope="module", params=["native", "transformers"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder: Path = tmp_path_factory.mktemp("llava")
    theirs = make_llava(folder)
    return TinyModel(theirs, load_model(folder, LoadOptions(num_threads=1, model_impl=request.param)))


@pytest.fixture
def encoder(model: TinyModel) -> Counted:
    ours: Any = model.ours.model
    return Counted(ours.item_encoder)


@pytest.fixture
def driver(model: TinyModel, encoder: Counted) -> PlanDriver:
    rows = EncodedRows(encoder, torch.device("cpu"), torch.float32)
    return model.driver(features=[rows])


def add(driver: PlanDriver, name: str, parts: list[int | Tensor]):
    token_ids, items = prompt_with(*parts)
    request = driver.add(name, token_ids)
    if items.items:
        request.extras[MediaItems] = items
    return request


def expected(model: TinyModel, parts: list[int | Tensor]) -> list[int]:
    token_ids, _ = prompt_with(*parts)
    pictures = [part for part in parts if isinstance(part, Tensor)]
    theirs: Any = model.theirs
    generated = theirs.generate(
        input_ids=torch.tensor([token_ids]),
        **({"pixel_values": torch.stack(pictures)} if pictures else {}),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    ids: list[int] = generated[0, len(token_ids) :].tolist()
    return ids


def test_ids_are_those_of_transformers_however_prompts_are_cut_and_preempted(model, driver):
    requests = {name: add(driver, name, parts) for name, parts in PROMPTS.items()}
    run_in_random_steps(driver, num_tokens=NUM_TOKENS, seed=9, preempt=True)
    outputs = {name: request.output_token_ids[:NUM_TOKENS] for name, request in requests.items()}
    assert outputs == {name: expected(model, parts) for name, parts in PROMPTS.items()}
    assert len({token for output in outputs.values() for token in output}) > 8


def test_another_picture_in_the_same_text_yields_other_ids(model, driver):
    one, other = add(driver, "one", [3, picture(1), 4]), add(driver, "other", [3, picture(2), 4])
    run_in_random_steps(driver, num_tokens=NUM_TOKENS, seed=1, preempt=False)
    assert one.output_token_ids[:NUM_TOKENS] != other.output_token_ids[:NUM_TOKENS]


def test_a_picture_is_encoded_once_until_its_output_is_evicted(driver, encoder):
    first = add(driver, "first", [3, picture(1), 4])
    driver.step({"first": 6})
    driver.step({"first": len(first.token_ids) - 6})
    add(driver, "second", [5, picture(1), 4])
    driver.step({"second": 11})
    assert encoder.num_calls == 1
    (item,) = first.extras[MediaItems].items
    third = add(driver, "third", [5, picture(2), 4])
    work = EncoderWork((RowItems("third", (0,)),), (item.key,))
    driver.step({"third": len(third.token_ids)}, parts={EncoderWork: work})
    add(driver, "fourth", [6, picture(1)])
    driver.step({"fourth": 10})
    assert encoder.num_calls == 3


def test_rows_without_pictures_reach_no_encoder_and_keep_their_ids(model, driver, encoder):
    plain = add(driver, "plain", [5, 6, 7])
    while len(plain.output_token_ids) < NUM_TOKENS:
        driver.step({"plain": plain.num_pending_tokens})
    assert (plain.output_token_ids, encoder.num_calls) == (expected(model, [5, 6, 7]), 0)


def test_what_the_encoder_raises_ends_the_row_alone(driver, encoder):
    def fail(inputs: dict[str, Tensor]) -> Tensor:
        raise ValueError("no such picture")

    encoder.encode = fail
    add(driver, "plain", [5, 6, 7])
    add(driver, "own", [3, picture(1), 4])
    result = driver.step({"plain": 3, "own": 11})
    assert result.failed == {1: "EncodedRows failed: ValueError: no such picture"}
    assert [len(tokens) for tokens in result.sampled] == [1, 0]
