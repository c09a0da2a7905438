"""Writes what sentence-transformers computes: FOLDER of a model, TEXTS as a JSON file, VECTORS to write."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer


def main(folder: str, texts: str, vectors: str) -> None:
    torch.set_num_threads(2)
    model = SentenceTransformer(folder, device="cpu", local_files_only=True)
    np.save(vectors, model.encode(json.loads(Path(texts).read_text()), batch_size=32))


if __name__ == "__main__":
    main(*sys.argv[1:])
