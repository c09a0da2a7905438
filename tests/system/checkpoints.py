"""Small checkpoints made with transformers, and what transformers itself generates from them."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

VOCAB_SIZE = 512
MAX_POSITIONS = 512
WINDOW = 32
ARCHITECTURES = ("llama", "qwen2", "gpt2")
_MIXTURES = {"mixtral": (MixtralForCausalLM, MixtralConfig), "gpt_oss": (GptOssForCausalLM, GptOssConfig)}
MIN_MARGIN = 1e-4
EMBEDDING = re.compile("embed|wte|wpe|lm_head")
EMBEDDING_GAIN = 4.0
LINEAR_GAIN = 12.0
OPENING, CLOSING = "<think>", "</think>"
THINKING_TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call> {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>{% endif %}{% endif %}"
    "{# </think> #}"
)


def make_checkpoint(architecture: str, folder: Path) -> Path:
    """Write an fp32 checkpoint with a byte-level tokenizer into `folder`; returns the folder.

    Weights are drawn wide enough that greedy streams vary: at least 20 distinct ids of 64.
    """
    torch.manual_seed(20)
    return _write(_new_model(architecture), folder)


def make_slow_llama(folder: Path) -> Path:
    """Write a Llama whose steps take tens of milliseconds on two cores, so that a step can be aimed at."""
    torch.manual_seed(21)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=16,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        dtype=torch.float32,
    )
    return _write(LlamaForCausalLM(config).eval(), folder)


def make_thinking_llama(folder: Path) -> Path:
    """Write the Llama of `make_checkpoint` with markers of reasoning among its special tokens.

    Its chat template opens the reasoning where `enable_thinking` is on, and shows tools by their names.
    """
    torch.manual_seed(20)
    _write(_new_model("llama"), folder, special=(OPENING, CLOSING))
    (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    return folder


def make_windowed_mixture(folder: Path) -> Path:
    """Write a Mixtral whose layers see the last `WINDOW` positions alone; it has the markers of reasoning."""
    torch.manual_seed(22)
    return _write(_new_model("mixtral", sliding_window=WINDOW), folder, special=(OPENING, CLOSING))


def make_hybrid(folder: Path, like: Path) -> Path:
    """Write a Qwen3.5 of which two layers keep states and one has attention, for the tokenizer in `like`."""
    torch.manual_seed(23)
    config = Qwen3_5TextConfig(
        vocab_size=Tokenizer.from_file(str(like / "tokenizer.json")).get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=0,
        dtype=torch.float32,
    )
    _write(Qwen3_5ForCausalLM(config).eval(), folder)
    shutil.copy(like / "tokenizer.json", folder)
    return folder


def _write(model: PreTrainedModel, folder: Path, *, special: tuple[str, ...] = ()) -> Path:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.mul_(EMBEDDING_GAIN if EMBEDDING.search(name) else LINEAR_GAIN)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder, safe_serialization=True)
    write_tokenizer(folder, special)
    return folder


def write_tokenizer(folder: Path, special: tuple[str, ...] = ()) -> None:
    """Write a byte-level tokenizer of `VOCAB_SIZE` ids, of which 0 ends a text."""
    _make_tokenizer(special).save(str(folder / "tokenizer.json"))


def _new_model(architecture: str, **changes: object) -> PreTrainedModel:
    shared = {"vocab_size": VOCAB_SIZE, "eos_token_id": 0, "bos_token_id": 0, "dtype": torch.float32}
    block = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
    }
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **block, **shared)).eval()
    if architecture == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=False, **block, **shared)).eval()
    if architecture in _MIXTURES:
        model_class, config_class = _MIXTURES[architecture]
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False}
        layers = {"layer_types": ["full_attention"] * 3}
        return model_class(config_class(**experts, **layers, **block, **shared, **changes)).eval()
    if architecture == "gpt2":
        config = GPT2Config(n_positions=MAX_POSITIONS, n_embd=64, n_layer=3, n_head=4, **shared)
        return GPT2LMHeadModel(config).eval()
    raise ValueError(f"unknown architecture {architecture!r}")


def _make_tokenizer(special: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<end>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [
        "the quick brown fox jumps over the lazy dog and runs along the river bank to the old stone bridge"
    ]
    tokenizer.train_from_iterator(text * 4, trainer)
    tokenizer.add_tokens([f"<pad{i}>" for i in range(VOCAB_SIZE - tokenizer.get_vocab_size())])
    return tokenizer


@dataclass(frozen=True)
class GreedyStream:
    """What transformers' own generate returns, and how sure it was: `margins[i]` is the lead of token i."""

    token_ids: list[int]
    margins: list[float]

    def first_real_difference(self, token_ids: list[int]) -> str | None:
        """Describe where `token_ids` leaves this stream, or None.

        Where the two best logits are closer than `MIN_MARGIN`, rounding decides: the comparison ends there.
        """
        for index, (ours, theirs, margin) in enumerate(
            zip(token_ids, self.token_ids, self.margins, strict=False)
        ):
            if ours != theirs:
                if margin <= MIN_MARGIN:
                    return None
                return f"token {index}: {ours} instead of {theirs}, margin {margin:.3g}"
        if len(token_ids) != len(self.token_ids):
            return f"{len(token_ids)} tokens instead of {len(self.token_ids)}"
        return None


class Reference:
    """A checkpoint run by transformers alone."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()

    @torch.inference_mode()
    def generate(
        self, prompt_token_ids: list[int], max_tokens: int, *, stop_at_eos: bool = False
    ) -> GreedyStream:
        """Continue one prompt greedily. With `stop_at_eos` the checkpoint's own end tokens end the stream."""
        arguments = {} if stop_at_eos else {"eos_token_id": None}
        output = self._model.generate(
            torch.tensor([prompt_token_ids]),
            attention_mask=torch.ones(1, len(prompt_token_ids), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            **arguments,
        )
        token_ids = output.sequences[0, len(prompt_token_ids) :].tolist()
        top = [torch.topk(logits[0].float(), 2).values for logits in output.logits]
        return GreedyStream(token_ids, [float(pair[0] - pair[1]) for pair in top])
