"""PYTHON -m benchmarks.contestants.embeddings NAME MODEL THREADS: makes vectors of texts in batches.

NAME: triptych (`LLM.embed`), sentence-transformers or onnxruntime, which needs a file model.onnx in the
folder `onnx` of the model. Answers `{"texts": [...], "vectors": BOOL}` with the seconds, and the vectors if
they are asked for.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Embed = Callable[[list[str]], Sequence[Any]]

BATCH_SIZE = 32


def main() -> None:
    name, model, num_threads = sys.argv[1:4]
    embed = _MAKERS[name](model, int(num_threads))
    print(json.dumps({"ready": name}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started_at = time.perf_counter()
        vectors = embed(asked["texts"])
        answer: dict[str, object] = {"seconds": time.perf_counter() - started_at}
        if asked["vectors"]:
            answer["vectors"] = [list(map(float, vector)) for vector in vectors]
        print(json.dumps(answer), flush=True)


def _triptych(model: str, num_threads: int) -> Embed:
    from triptych_cli.llm import LLM

    llm = LLM(model, num_threads=num_threads, dtype="float32")
    return lambda texts: [result.values for result in llm.embed(texts)]


def _sentence_transformers(model: str, num_threads: int) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(num_threads)
    loaded = SentenceTransformer(model, device="cpu", local_files_only=True)

    def embed(texts: list[str]) -> Sequence[Any]:
        vectors: Sequence[Any] = loaded.encode(texts, batch_size=BATCH_SIZE)
        return vectors

    return embed


def _onnxruntime(model: str, num_threads: int) -> Embed:
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    path = str(Path(model) / "onnx" / "model.onnx")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    tokenizer.enable_padding()

    def embed(texts: list[str]) -> Sequence[Any]:
        # As sentence-transformers batches them: by length.
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        found: list[Any] = [None] * len(texts)
        for first in range(0, len(order), BATCH_SIZE):
            part = order[first : first + BATCH_SIZE]
            encoded = tokenizer.encode_batch([texts[index] for index in part])
            mask = np.array([each.attention_mask for each in encoded])
            ids = np.array([each.ids for each in encoded])
            inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
            (states, *_) = session.run(None, inputs)
            means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            means /= np.linalg.norm(means, axis=1, keepdims=True)
            for index, vector in zip(part, means, strict=True):
                found[index] = vector
        return found

    return embed


_MAKERS: dict[str, Callable[[str, int], Embed]] = {
    "triptych": _triptych,
    "sentence-transformers": _sentence_transformers,
    "onnxruntime": _onnxruntime,
}

if __name__ == "__main__":
    main()
