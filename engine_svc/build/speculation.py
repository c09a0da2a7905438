"""Builds the proposer of a rank from the configuration, and measures the costs that limit drafts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine_svc.build.start_check import PROPOSER_ENTRY_POINTS
from engine_svc.config import EngineConfig
from engine_svc.core.step import StepCosts
from engine_svc.model.decoder import Model
from engine_svc.model.errors import ModelError
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.model.loading.loader import LoadedModel, LoadOptions, load_model
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.runner.control import RunnerControl
from engine_svc.runner.step_drafts import MakeStepDrafts, NoDrafting
from engine_svc.speculation.drafting import Drafting
from engine_svc.speculation.head_weights import load_eagle_head, load_mtp_head
from engine_svc.speculation.network import DraftNetwork, ModelNetwork, NetworkProposer
from engine_svc.speculation.proposer import ByRow, Proposer, RowProposer
from engine_svc.speculation.text_proposers import NgramProposer, SuffixProposer
from triptych_kit.config import ConfigError
from triptych_kit.plugins import find_offered

_TEXT_PROPOSERS: dict[str, Callable[[], RowProposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
    # Without a network: what it costs where nothing pays is never noticed.
    "auto": SuffixProposer,
}
_SCALAR_COSTS = (
    "seconds_per_read",
    "seconds_per_draw",
    "seconds_per_drafted_step",
    "seconds_per_drafted_row",
)
# Blocks and their tokens have 32-bit indexes.
_MAX_CACHED_TOKENS = 1 << 30
_TOKENIZER = "tokenizer.json"
_SENTENCEPIECE = "tokenizer.model"


class NoProposer(Proposer):
    """Of an engine without drafts."""


def make_drafting(config: EngineConfig, proposer: Proposer) -> MakeStepDrafts:
    """What makes the drafts of a runner's steps."""
    if config.speculation.method == "off":
        return NoDrafting
    return partial(Drafting, proposer, config.steps_in_flight)


def make_proposer(config: EngineConfig, loaded: LoadedModel, options: LoadOptions) -> Proposer:
    """The proposer of one rank.  options: those that `loaded` was loaded with.

    Raises ConfigError, CheckpointError or UnsupportedModel with a message for operators.
    """
    method, num_drafts, folder = config.speculation
    if method == "off":
        return NoProposer()
    make_network = _network_makers(loaded, options, Path(folder or "")).get(method)
    if make_network is None:
        make_row_proposer = find_offered(
            method, _TEXT_PROPOSERS, group=PROPOSER_ENTRY_POINTS, option="--speculative"
        )
        return ByRow(make_row_proposer())
    try:
        if method == "draft":
            _check_tokenizer(Path(config.model), Path(folder or ""))
        return _make_network_proposer(config, loaded, make_network, num_drafts)
    except ModelError as error:
        given = "--speculative mtp" if method == "mtp" else f"--speculative-model {folder}"
        raise ConfigError(f"{given}: {error}") from error


def _make_network_proposer(
    config: EngineConfig,
    loaded: LoadedModel,
    make_network: Callable[[Model, Checkpoint], DraftNetwork],
    num_drafts: int,
) -> NetworkProposer:
    # No request is longer.
    window = min(config.draft_window, config.max_model_len or loaded.facts.max_position)
    if config.max_num_seqs * window >= _MAX_CACHED_TOKENS:
        raise ConfigError(
            f"--max-num-seqs {config.max_num_seqs} times --draft-window {window} is not below "
            f"{_MAX_CACHED_TOKENS} tokens"
        )
    try:
        return NetworkProposer(
            make_network,
            loaded.model,
            Checkpoint(Path(config.model)),
            num_rows=config.max_num_seqs,
            num_drafts=num_drafts,
            vocab_size=loaded.facts.vocab_size,
            window=window,
            max_tokens=config.max_num_batched_tokens,
            device=loaded.device,
        )
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"there is no memory for the drafts of --max-num-seqs {config.max_num_seqs} requests with "
            f"--draft-window {window}: lower either ({str(error).splitlines()[0]})"
        ) from error


def _network_makers(
    loaded: LoadedModel, options: LoadOptions, folder: Path
) -> dict[str, Callable[[Model, Checkpoint], DraftNetwork]]:
    """By method. None of them refers to the weights of `loaded`, which a reload replaces."""
    facts, ops = loaded.facts, loaded.ops
    options = LoadOptions(
        dtype=options.dtype,
        device=loaded.device.type,
        num_threads=options.num_threads,
        is_deterministic=options.is_deterministic,
        cpu_isa=options.cpu_isa,
        activations=options.activations,
        packed_weights=options.packed_weights,
    )

    def make_model(target: Model, checkpoint: Checkpoint) -> DraftNetwork:
        draft = load_model(folder, options, ops=ops)
        return ModelNetwork(draft.model, draft.facts, draft.shared_bytes)

    def make_eagle(target: Model, checkpoint: Checkpoint) -> DraftNetwork:
        return load_eagle_head(folder, _native(target, "eagle"), facts)

    def make_mtp(target: Model, checkpoint: Checkpoint) -> DraftNetwork:
        return load_mtp_head(checkpoint, _native(target, "mtp"), facts)

    return {"draft": make_model, "eagle": make_eagle, "mtp": make_mtp}


def _native(target: Model, method: str) -> NativeDecoder:
    if not isinstance(target, NativeDecoder):
        raise ConfigError(f"--speculative {method} needs a native model, and transformers runs this one")
    return target


def _check_tokenizer(folder: Path, draft_folder: Path) -> None:
    """Raise ConfigError unless both folders' tokenizers give the same ids to the same texts."""
    for name, read in ((_TOKENIZER, _ids_of), (_SENTENCEPIECE, Path.read_bytes)):
        paths = folder / name, draft_folder / name
        if all(path.is_file() for path in paths):
            try:
                is_same = read(paths[0]) == read(paths[1])
            except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
                raise ConfigError(f"--speculative-model: {name} cannot be read: {error}") from error
            if not is_same:
                raise ConfigError(
                    f"--speculative-model {draft_folder} has another tokenizer than the model: {name} differs"
                )
            return
    raise ConfigError(
        f"--speculative-model {draft_folder}: whether it has the model's tokenizer cannot be checked, as not "
        f"both folders have {_TOKENIZER} or {_SENTENCEPIECE}"
    )


def _ids_of(path: Path) -> tuple[object, ...]:
    """What of a tokenizer.json decides on ids."""
    content = json.loads(path.read_text("utf-8"))
    model = content.get("model") or {}
    added = [(token.get("id"), token.get("content")) for token in content.get("added_tokens") or ()]
    # A merge is a pair, or a line with a space between its tokens.
    merges = [each.split(" ") if isinstance(each, str) else each for each in model.get("merges") or ()]
    return model.get("type"), model.get("vocab"), merges, added


def measure_step_costs(config: EngineConfig, control: RunnerControl) -> StepCosts:
    """Measures steps in all ranks at the same time; the slowest counts."""
    max_positions = min(
        config.max_num_batched_tokens, config.max_num_seqs * (1 + config.speculation.num_tokens)
    )
    measured: list[dict[str, Any]] = [
        dict(answer) for answer in control.call_all("step_costs", {"max_positions": max_positions})
    ]
    return StepCosts(
        tuple(measured[0]["counts"]),
        _slowest(measured, "seconds"),
        proposal_seconds=_slowest(measured, "proposal_seconds"),
        **{name: max(answer[name] for answer in measured) for name in _SCALAR_COSTS},
    )


def _slowest(measured: Sequence[dict[str, Any]], name: str) -> tuple[float, ...]:
    return tuple(map(max, zip(*(answer[name] for answer in measured), strict=True)))
