"""A tokenizer.model is converted once, in a process, and refused in words for an operator."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from frontend_svc.text.tokenize.slow_tokenizer import CONVERT_COMMAND, SlowTokenizerError, SlowTokenizers

FILES = {"tokenizer.model": b"model", "tokenizer_config.json": b"{}"}


def converter(deed: str, folder: Path, **options) -> SlowTokenizers:
    script = str(Path(__file__).with_name("fake_converter.py"))
    return SlowTokenizers(command=(sys.executable, script, deed, str(folder / "diary")), **options)


def conversions(folder: Path) -> list[str]:
    return (folder / "diary").read_text().split()


async def test_a_tokenizer_is_converted_once_however_many_ask(tmp_path):
    slow = converter("converts", tmp_path)
    contents = await asyncio.gather(*(slow.convert(dict(FILES)) for _ in range(5)))
    assert contents == [b"model+{}"] * 5
    assert len(conversions(tmp_path)) == 1
    assert await slow.convert({**FILES, "tokenizer.model": b"other"}) == b"other+{}"
    assert len(conversions(tmp_path)) == 2
    assert [folder for folder in conversions(tmp_path) if Path(folder).exists()] == []


@pytest.mark.parametrize(
    ("deed", "time_limit_s", "num_tries", "words"),
    [
        ("misses its extra", 60.0, 1, r"pip install 'triptych\[slow-tokenizers\]'"),
        ("fails", 60.0, 1, "cannot be converted: line one\nno such model type"),
        ("does nothing", 60.0, 1, "nothing came out"),
        ("hangs", 1.0, 2, "took longer than the limit of 1 s"),
    ],
)
async def test_a_failure_says_what_to_do_and_is_not_repeated(tmp_path, deed, time_limit_s, num_tries, words):
    slow = converter(deed, tmp_path, time_limit_s=time_limit_s)
    with pytest.raises(SlowTokenizerError, match=words):
        await slow.convert(dict(FILES))
    assert [folder for folder in conversions(tmp_path) if Path(folder).exists()] == []
    with pytest.raises(SlowTokenizerError, match=words):
        await slow.convert(dict(FILES))
    assert len(conversions(tmp_path)) == num_tries


TRAIN = """
import sys, sentencepiece
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["the cat sat on the mat and the dog sat on the cat"] * 200),
    model_prefix=sys.argv[1], vocab_size=300, model_type="bpe", byte_fallback=True,
    hard_vocab_limit=False, minloglevel=2,
)
processor = sentencepiece.SentencePieceProcessor(model_file=sys.argv[1] + ".model")
print(*processor.encode("the cat sat on 日本"))
"""


WITH_LIBRARIES = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.network
async def test_the_real_converter_keeps_the_ids(tmp_path):
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed)]
    subprocess.run([*pip, "sentencepiece>=0.2,<0.2.2", "tiktoken>=0.9"], check=True)
    path = os.pathsep.join((str(installed), *(entry for entry in sys.path if entry)))
    trained = subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path / "tokenizer")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [int(token_id) for token_id in trained.stdout.split()]
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    files = {
        "tokenizer.model": (tmp_path / "tokenizer.model").read_bytes(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "config.json": b"{}",
    }
    # The environment of a frontend with the extra: its own module path, with the libraries on it.
    command = (sys.executable, "-c", WITH_LIBRARIES, str(installed), CONVERT_COMMAND[-1])
    content = await SlowTokenizers(command=command).convert(files)
    converted = Tokenizer.from_str(content.decode())
    assert converted.encode("the cat sat on 日本", add_special_tokens=False).ids == expected
