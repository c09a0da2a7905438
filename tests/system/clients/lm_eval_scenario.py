# /// script
# dependencies = ["lm-eval[api]==0.4.13"]
# ///
"""lm-evaluation-harness."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from steps import MODEL, run

# The tasks are of local files: nothing is asked of the hub.
os.environ["HF_HUB_OFFLINE"] = "1"
import lm_eval
from lm_eval.tasks import TaskManager

# The index of its own tasks takes half a minute.
TASKS = TaskManager(include_defaults=False)
PLACES = ["a town", "a river", "the sea", "a fox and a bell", "a hill by the lake", "a king"]
CHOICES = [" There was a tower.", " The bridge of the king", " Two ships"]


def task(name: str, **config: Any) -> dict[str, Any]:
    path = Path(tempfile.mkdtemp()) / "places.jsonl"
    path.write_text("".join(json.dumps({"place": place, "goal": 0}) + "\n" for place in PLACES))
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "doc_to_text": "Tell me a story about {{place}}.",
        "doc_to_target": "goal",
        **config,
    }


def choice_task() -> dict[str, Any]:
    return task("places", output_type="multiple_choice", doc_to_choice=CHOICES)


def text_task() -> dict[str, Any]:
    generation = {"until": ["\n\n"], "max_gen_toks": 40, "temperature": 1}
    metrics = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    return task("sentences", output_type="generate_until", generation_kwargs=generation, metric_list=metrics)


def samples(model: str, address: str, config: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    arguments = {"model": MODEL, "base_url": address, "max_retries": 1, **options}
    answer = lm_eval.simple_evaluate(
        model,
        model_args=arguments,
        tasks=[config],
        task_manager=TASKS,
        apply_chat_template=model == "local-chat-completions",
        bootstrap_iters=0,
    )
    return answer["samples"][config["task"]]


def likelihoods(base: str) -> None:
    """`local-completions`: log-likelihoods, its tokenizer that of the server"""
    alone = samples("local-completions", f"{base}/completions", choice_task())
    values = [value for sample in alone for value, _ in sample["filtered_resps"]]
    assert all(value < 0 for value in values)
    assert len(set(values)) == len(PLACES) * len(CHOICES)
    at_once = samples(
        "local-completions", f"{base}/completions", choice_task(), batch_size=4, num_concurrent=2
    )
    again = [value for sample in at_once for value, _ in sample["filtered_resps"]]
    assert all(abs(one - other) < 1e-3 for one, other in zip(values, again, strict=True)), (values, again)


def texts(base: str) -> None:
    """`local-completions` and `local-chat-completions`: `generate_until`"""
    for model, path in (("local-completions", "completions"), ("local-chat-completions", "chat/completions")):
        found = [sample["resps"][0][0] for sample in samples(model, f"{base}/{path}", text_task())]
        assert len(set(found)) == len(PLACES), found
        assert len({word for text in found for word in text.split()}) >= 20, found


run(likelihoods, texts)
