"""A model from a GGUF file answers as it does from its folder."""

from __future__ import annotations

import functools
from pathlib import Path

import gguf
import pytest
from transformers import AutoConfig

from tests.engine_svc.model.loading.gguf.gguf_models import add_tokens_of, write_model
from triptych_cli.llm import LLM, SamplingParams
from triptych_cli.services import embedded_model

OPTIONS = {"num_threads": 1, "num_kv_blocks": 256, "device": "cpu"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["Once upon a time", "  The dog's 12 bones,\n\tand \u00e4 cat <|end|>", [5, 6, 7, 900]]
CHAT = [{"role": "user", "content": "Tell me of a cat."}]


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
        add_tokens=functools.partial(add_tokens_of, source),
    )
    answers = []
    drafts = {"speculative": "draft", "speculative_model": str(path), "draft_limit": "none"}
    for model, engine, more in (
        (source, "in-process", {}),
        (path, "child", {}),
        (path, "in-process", drafts),
    ):
        with LLM(model, engine=engine, **OPTIONS, **more) as llm:
            results = llm.generate(PROMPTS, GREEDY, progress=False)
            results += llm.chat(CHAT, GREEDY, progress=False)
        outputs = [(result.prompt_token_ids, result.outputs[0]) for result in results]
        answers.append([(ids, one.token_ids, one.text, one.finish_reason) for ids, one in outputs])
    assert answers[0] == answers[1] == answers[2]
    assert all(result.usage.num_accepted_draft_tokens for result in results)
