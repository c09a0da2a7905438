"""PYTHON -m benchmarks.contestants.logits NAME MODEL THREADS OPTIONS: how a model continues given tokens.

NAME: triptych, the forward of its engine, with OPTIONS of `LoadOptions` as JSON; or llama.cpp, as
llama-cpp-python has it. Answers `{"token_ids": [...], "path": FILE, "writes": BOOL}` with the sum of -log p
of each token but the first one. It either writes all log probabilities to the file, or reads those of another
process from there and compares its own with them.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float32]
# Logits [T - 1, V] of the tokens after each of T but the last one.
Forward = Callable[[list[int]], Numbers]

_ROWS_AT_ONCE = 32
_BLOCK_SIZE = 16


def main() -> None:
    name, model, num_threads, options = sys.argv[1:5]
    forward, facts = _MAKERS[name](model, int(num_threads), json.loads(options))
    print(json.dumps({"ready": name, **facts}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = compare(forward(asked["token_ids"]), asked["token_ids"][1:], asked["path"], asked["writes"])
        print(json.dumps(answer), flush=True)


def compare(logits: Numbers, targets: list[int], path: str, writes: bool) -> dict[str, float]:
    """Sums over targets: -log p, divergence from the distributions of the file, equal most likely tokens."""
    stored = np.memmap(path, np.float32, "w+" if writes else "r", shape=logits.shape)
    loss = divergence = num_equal = 0.0
    for first in range(0, len(targets), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        ours = _log_softmax(logits[rows])
        loss -= float(ours[np.arange(len(ours)), targets[rows]].sum(dtype=np.float64))
        if writes:
            stored[rows] = ours
            continue
        theirs = stored[rows]
        divergence += float((np.exp(theirs) * (theirs - ours)).sum(dtype=np.float64))
        num_equal += float((theirs.argmax(-1) == ours.argmax(-1)).sum())
    return {"loss": loss, "divergence": divergence, "num_equal": num_equal}


def _log_softmax(logits: Numbers) -> Numbers:
    shifted = logits - logits.max(-1, keepdims=True)
    result: Numbers = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _triptych(model: str, num_threads: int, options: dict[str, Any]) -> tuple[Forward, dict[str, float]]:
    import torch

    from engine_svc.model.context import ForwardContext
    from engine_svc.model.loading.loader import LoadOptions, load_model
    from engine_svc.model.native.decoder import NativeDecoder
    from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
    from triptych_kernels import AttentionBatch

    loaded = load_model(model, LoadOptions(num_threads=num_threads, **options))
    facts, device = loaded.facts, loaded.device
    groups = range(len(facts.groups))

    @torch.inference_mode()
    def forward(token_ids: list[int]) -> Numbers:
        num_tokens = len(token_ids) - 1
        num_blocks = -(-num_tokens // _BLOCK_SIZE)
        # Each group of layers has blocks of its own.
        kv = KVTensors(facts, KVSizing(num_blocks * len(groups), _BLOCK_SIZE, bytes_per_block=0), device)
        tables = torch.arange(num_blocks * len(groups), device=device).view(len(groups), 1, num_blocks)
        positions = torch.arange(num_tokens, device=device)
        context = ForwardContext(
            kv.layers,
            [positions + group * num_blocks * _BLOCK_SIZE for group in groups],
            [AttentionBatch.of(table, [num_tokens], [num_tokens], _BLOCK_SIZE) for table in tables],
        )
        ids = torch.tensor(token_ids[:-1], device=device)
        logits: Numbers = loaded.model.forward(ids, positions, positions, context).cpu().numpy()
        return logits

    if isinstance(loaded.model, NativeDecoder):
        return forward, {"weight_bytes": loaded.model.num_bytes}
    return forward, {}


def _llama_cpp(model: str, num_threads: int, options: dict[str, Any]) -> tuple[Forward, dict[str, float]]:
    import llama_cpp

    llama_cpp.llama_backend_init()
    log = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    model_options = llama_cpp.llama_model_default_params()
    model_options.n_gpu_layers = 0
    loaded = llama_cpp.llama_model_load_from_file(model.encode(), model_options)
    if not loaded:
        raise SystemExit(f"llama.cpp cannot load {model}")
    num_logits = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
    context_options = llama_cpp.llama_context_default_params()
    window = context_options.n_ctx = context_options.n_batch = context_options.n_ubatch = options["window"]
    context_options.n_threads = context_options.n_threads_batch = num_threads
    context = llama_cpp.llama_init_from_model(loaded, context_options)
    batch = llama_cpp.llama_batch_init(window, 0, 1)

    def forward(token_ids: list[int]) -> Numbers:
        # The library only has the address of its log.
        assert log is not None
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch.n_tokens = len(token_ids) - 1
        for position, token_id in enumerate(token_ids[:-1]):
            batch.token[position], batch.pos[position] = token_id, position
            batch.n_seq_id[position], batch.seq_id[position][0], batch.logits[position] = 1, 0, 1
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama.cpp failed to decode")
        pointer = llama_cpp.llama_get_logits(context)
        logits: Numbers = np.ctypeslib.as_array(pointer, shape=(batch.n_tokens, num_logits))
        return logits

    return forward, {}


_MAKERS: dict[str, Callable[[str, int, dict[str, Any]], tuple[Forward, dict[str, float]]]] = {
    "triptych": _triptych,
    "llama.cpp": _llama_cpp,
}

if __name__ == "__main__":
    main()
