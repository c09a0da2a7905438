"""The models of the languages: random ones with a small vocabulary of each kind, the embedded one, others."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.checkpoint import CheckpointShape, learned_tokenizer, make_checkpoint
from engine_svc.features.structured_output.backends.backend import Vocabulary
from tools.tiny_model.corpus import training_examples
from triptych_cli.services import embedded_model

_SHAPE = CheckpointShape(
    hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=256, vocabulary_size=2_048
)
_NUM_EXAMPLES = 1_000
_NUM_PIECES = 1_200


@dataclass(frozen=True)
class Model:
    """max_tokens: of an answer. chat_template: "" where requests are no chats, "own" for the model's own.

    few_blocks: of KV, so few that 64 requests take them from each other, and enough for the longest.
    """

    name: str
    folder: Path
    max_tokens: int
    chat_template: str = ""
    few_blocks: int = 400

    @cached_property
    def vocabulary(self) -> Vocabulary:
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        eos = config["eos_token_id"]
        text = (self.folder / "tokenizer.json").read_text(encoding="utf-8")
        return Vocabulary(text, config["vocab_size"], tuple(eos) if isinstance(eos, list) else (eos,))


def make_models(names: list[str], folder: Path, seed: int) -> Iterator[Model]:
    """Those with random weights are made in the folder. Other names are FOLDER:TEMPLATE."""
    for name in names:
        if name == "embedded":
            yield Model(name, embedded_model(), 400, "own")
        elif name in _TOKENIZERS:
            tokenizer = _TOKENIZERS[name](seed)
            make_checkpoint(
                folder / name, _SHAPE, dtype=torch.float32, seed=seed, tokenizer=tokenizer, is_varied=True
            )
            yield Model(name, folder / name, 400)
        else:
            path, _, template = name.partition(":")
            # Its layers may be of several groups with blocks of their own.
            yield Model(Path(path).name, Path(path), 400, template, few_blocks=2400)


def byte_fallback_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """As of Llama 2 from SentencePiece: words begin with a mark, what it does not know is bytes."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=_NUM_PIECES, show_progress=False)
    examples = itertools.islice(training_examples(seed), _NUM_EXAMPLES)
    learned.train_from_iterator((turn.text for example in examples for turn in example.turns), trainer)
    document = json.loads(learned.to_str())["model"]
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(document["vocab"], key=document["vocab"].__getitem__)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[tuple(merge) for merge in document["merges"]],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


_TOKENIZERS: dict[str, Callable[[int], PreTrainedTokenizerFast]] = {
    "byte-level": learned_tokenizer,
    "SentencePiece": byte_fallback_tokenizer,
}
