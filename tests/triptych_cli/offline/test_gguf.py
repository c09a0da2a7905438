"""A model from a GGUF file answers as it does from its folder."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from transformers import AutoConfig

from tests.engine_svc.model.loading.gguf.gguf_models import write_model
from triptych_cli.llm import LLM, SamplingParams
from triptych_cli.services import embedded_model

OPTIONS = {"num_threads": 1, "num_kv_blocks": 256, "device": "cpu"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["Once upon a time", "  The dog's 12 bones,\n\tand \u00e4 cat <|end|>", [5, 6, 7, 900]]
CHAT = [{"role": "user", "content": "Tell me of a cat."}]
_CONTROL, _NORMAL = 3, 1


def add_tokens(writer: gguf.GGUFWriter) -> None:
    """The embedded model's vocabulary and template."""
    folder = embedded_model()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in special else _NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(1)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def test_the_embedded_model_is_the_same_from_a_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, path = embedded_model(), tmp_path / "stories.F32.gguf"
    write_model(
        source,
        AutoConfig.from_pretrained(source),
        path,
        tmp_path / "again",
        lambda name: gguf.GGMLQuantizationType.F32,
        add_tokens=add_tokens,
    )
    answers = []
    for model, engine in ((source, "in-process"), (path, "child")):
        with LLM(model, engine=engine, **OPTIONS) as llm:
            results = llm.generate(PROMPTS, GREEDY, progress=False)
            results += llm.chat(CHAT, GREEDY, progress=False)
        outputs = [(result.prompt_token_ids, result.outputs[0]) for result in results]
        answers.append([(ids, one.token_ids, one.text, one.finish_reason) for ids, one in outputs])
    assert answers[0] == answers[1]
