"""Train the embedded model from nothing: `python -m tools.tiny_model.train --output FOLDER`.

The text, the tokenizer and the weights follow from `Settings` alone. Knows no serving.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.tiny_model.corpus import training_examples
from tools.tiny_model.first_heads import give_first_heads
from tools.tiny_model.tokenizer import END, PAD, VOCABULARY_SIZE, encode_example, learn_tokenizer, token_id
from triptych_cli.services import embedded_model

WEIGHTS_FOLDER = embedded_model()
_TOKENIZER_EXAMPLES = 40_000
_BATCHES_SORTED_TOGETHER = 64
_ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the trained weights depend on, apart from the machine's rounding."""

    seed: int = 20_260
    num_steps: int = 2_400
    tokens_per_step: int = 2_048
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    intermediate_size: int = 768
    learning_rate: float = 3e-3
    num_warmup_steps: int = 200
    weight_decay: float = 0.1
    num_threads: int = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples of about one length, padded at the right."""

    input_ids: Tensor  # [B, T] int64
    targets: Tensor  # [N] int64, the ids to be predicted
    positions: Tensor  # [N] int64, where in the flattened [B * T] each of them is predicted


def train(settings: Settings, output: Path) -> None:
    """Learn tokenizer and weights and write a Hugging Face folder that any loader reads."""
    torch.manual_seed(settings.seed)
    torch.set_num_threads(settings.num_threads)
    examples = itertools.islice(training_examples(settings.seed), _TOKENIZER_EXAMPLES)
    tokenizer = learn_tokenizer(turn.text for example in examples for turn in example.turns)
    model = _new_model(settings, tokenizer)
    print(
        f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters, {len(tokenizer)} tokens"
    )
    _fit(settings, model, tokenizer)
    save(model, tokenizer, output)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write weights in bf16, configuration and tokenizer.

    The configuration asks for fp32: in eight bits of precision two tokens are often equally likely, and which
    of them is taken would depend on how an engine adds.
    """
    model.train(False).to(torch.bfloat16).save_pretrained(output)
    model.config.dtype = torch.float32
    model.config.save_pretrained(output)
    tokenizer.save_pretrained(output)
    for path in output.iterdir():
        # Weights are written for their owner alone; a package is read by everybody.
        path.chmod(0o644)


def _new_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = LlamaForCausalLM(config)
    give_first_heads(model, _ROPE_THETA)
    # Eager attention is the faster one at sequences this short.
    model.set_attn_implementation("eager")
    stops = GenerationConfig(eos_token_id=end, pad_token_id=pad)  # type: ignore[no-untyped-call]
    model.generation_config = stops
    return model


def _fit(settings: Settings, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    optimizer = torch.optim.AdamW(_parameter_groups(model, settings), betas=(0.9, 0.98), fused=True)
    began, began_cpu = time.perf_counter(), time.process_time()
    model.train()
    batches = itertools.islice(draw_batches(settings, tokenizer), settings.num_steps)
    running = 0.0
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(settings, step)
        loss = _loss(model, batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        running += loss.item()
        if (step + 1) % 50 == 0:
            wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
            print(f"step {step + 1} loss {running / 50:.4f} wall {wall:.0f} s cpu {cpu:.0f} s", flush=True)
            running = 0.0


def _parameter_groups(model: nn.Module, settings: Settings) -> list[dict[str, object]]:
    """Weight decay for matrices, none for norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def _learning_rate(settings: Settings, step: int) -> float:
    """A straight warm-up, then half a cosine down to a fiftieth."""
    if step < settings.num_warmup_steps:
        return settings.learning_rate * (step + 1) / settings.num_warmup_steps
    done = (step - settings.num_warmup_steps) / max(1, settings.num_steps - settings.num_warmup_steps)
    return settings.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def _loss(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Mean cross entropy of the learned tokens; logits are computed for those alone."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden.flatten(0, 1)[batch.positions])
    return nn.functional.cross_entropy(logits.float(), batch.targets)


def draw_batches(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> Iterator[Batch]:
    """Endless batches of about `tokens_per_step` tokens, each of examples of about one length."""
    rng = random.Random(settings.seed + 1)
    pad = token_id(tokenizer, PAD)
    encoded = (encode_example(tokenizer, example) for example in training_examples(settings.seed + 2))
    while True:
        pool = list(_take_tokens(encoded, settings.tokens_per_step * _BATCHES_SORTED_TOGETHER))
        rng.shuffle(pool)
        pool.sort(key=lambda pair: len(pair[0]))
        groups = list(_group_by_tokens(pool, settings.tokens_per_step))
        rng.shuffle(groups)
        yield from (_batch_of(group, pad) for group in groups)


_Encoded = tuple[list[int], list[bool]]


def _take_tokens(encoded: Iterator[_Encoded], num_tokens: int) -> Iterator[_Encoded]:
    taken = 0
    while taken < num_tokens:
        ids, learned = next(encoded)
        taken += len(ids)
        yield ids, learned


def _group_by_tokens(pool: list[_Encoded], num_tokens: int) -> Iterator[list[_Encoded]]:
    group: list[_Encoded] = []
    for pair in pool:
        if (len(group) + 1) * len(pair[0]) > num_tokens and group:
            yield group
            group = []
        group.append(pair)
    yield group


def _batch_of(group: list[_Encoded], pad: int) -> Batch:
    length = max(len(ids) for ids, _ in group)
    input_ids = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in group])
    learned = torch.tensor([flags + [False] * (length - len(flags)) for _, flags in group])
    rows, columns = torch.nonzero(learned[:, 1:], as_tuple=True)
    return Batch(input_ids, input_ids[rows, columns + 1], rows * length + columns)


def main() -> None:
    """Train with the settings the packaged weights were made with."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", type=Path, default=WEIGHTS_FOLDER, help="folder to write")
    parser.add_argument("--steps", type=int, default=Settings().num_steps, help="fewer for a trial")
    arguments = parser.parse_args()
    train(Settings(num_steps=arguments.steps), arguments.output)


if __name__ == "__main__":
    main()
