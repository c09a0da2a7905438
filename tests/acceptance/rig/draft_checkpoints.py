"""Makes checkpoints that propose for a model: a draft model of its first layers, and heads; trained on texts.

    python -m tests.acceptance.rig.draft_checkpoints MODEL TEXTS FOLDER

TEXTS: a JSON list of lists of token ids, prompts with their outputs. Writes FOLDER/draft, FOLDER/eagle, and
FOLDER/mtp, a copy of the model with a head. Of random weights no draft would be accepted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine_svc.speculation.heads import MTP_LAYOUTS

NUM_STEPS = 200
_BATCH = 16
_LEARNING_RATE = 2e-3
_LAYOUT = MTP_LAYOUTS[0]


def make_draft_checkpoints(
    model: Path, texts: Sequence[Sequence[int]], folder: Path, num_steps: int = NUM_STEPS
) -> None:
    """Write the three checkpoints for `model` below `folder`; heads are trained in `num_steps`."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    target.requires_grad_(False)
    batches = [texts[first : first + _BATCH] for first in range(0, len(texts), _BATCH)]
    seen = [_hidden_states(target, batch) for batch in batches]
    _write_draft_model(model, seen, folder / "draft", num_steps)
    _write_eagle_head(target, model, seen, folder / "eagle", num_steps)
    _write_mtp_head(target, model, seen, folder / "mtp", num_steps)


class _Seen:
    """Training data of a head: ids [B, T], whether they are padding, and the target's hidden states."""

    def __init__(self, ids: Tensor, is_real: Tensor, streams: Sequence[Tensor], last: Tensor) -> None:
        self.ids, self.is_real, self.streams, self.last = ids, is_real, streams, last


def _hidden_states(target: Any, texts: Sequence[Sequence[int]]) -> _Seen:
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    is_real = torch.tensor([[index < len(text) for index in range(longest)] for text in texts])
    with torch.no_grad():
        found = target.model(ids, output_hidden_states=True)
    num_layers = target.config.num_hidden_layers
    streams = [found.hidden_states[index] for index in _layers_read(num_layers)]
    return _Seen(ids, is_real, streams, found.last_hidden_state)


def _layers_read(num_layers: int) -> list[int]:
    """As the published heads have them, where the model has as many layers."""
    layers = sorted({2, num_layers // 2, num_layers - 3})
    return (
        layers
        if len(layers) == 3 and layers[-1] < num_layers
        else sorted({0, num_layers // 2, num_layers - 1})
    )


def _write_draft_model(model: Path, seen: Sequence[_Seen], folder: Path, num_steps: int) -> None:
    """The first layers of the model, of which the last is trained, with its embeddings."""
    config = json.loads((model / "config.json").read_text())
    num_layers = max(1, config["num_hidden_layers"] // 3)
    config["num_hidden_layers"] = num_layers
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:num_layers]
    kept = {
        name: tensor
        for name, tensor in _tensors(model)
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    _write(folder, model, config, kept)
    draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draft.requires_grad_(False)
    trained = nn.ModuleList([draft.model.layers[-1], draft.model.norm]).requires_grad_(True)
    known, index_of = _known_tokens(seen, draft.config.vocab_size)
    rows = draft.get_output_embeddings().weight[known]

    def loss_of(each: _Seen) -> Tensor:
        hidden = draft.model(each.ids).last_hidden_state[:, :-1]
        wanted, is_real = each.ids[:, 1:], each.is_real[:, 1:]
        return F.cross_entropy(F.linear(hidden[is_real], rows), index_of[wanted[is_real]])

    _train(trained, seen, loss_of, num_steps)
    dtype = next(iter(kept.values())).dtype
    draft.to(dtype).save_pretrained(folder)


def _known_tokens(seen: Sequence[_Seen], vocab_size: int) -> tuple[Tensor, Tensor]:
    """The tokens of the texts, [K], and of every token its index there, [vocab_size]."""
    known = torch.cat([each.ids[each.is_real] for each in seen]).unique()
    index_of = torch.zeros(vocab_size, dtype=torch.int64)
    index_of[known] = torch.arange(len(known))
    return known, index_of


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _EagleHead(nn.Module):
    """A head as EAGLE-3 heads are published, with their names."""

    def __init__(self, size: int, num_streams: int, num_known: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, size // num_heads
        self.fc = nn.Linear(num_streams * size, size, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "hidden_norm": _Norm(size, eps),
                "input_layernorm": _Norm(size, eps),
                "post_attention_layernorm": _Norm(size, eps),
                "self_attn": nn.ModuleDict(
                    {f"{name}_proj": nn.Linear(2 * size, size, bias=False) for name in "qkv"}
                    | {"o_proj": nn.Linear(size, size, bias=False)}
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": nn.Linear(size, 2 * size, bias=False),
                        "up_proj": nn.Linear(size, 2 * size, bias=False),
                        "down_proj": nn.Linear(2 * size, size, bias=False),
                    }
                ),
            }
        )
        self.norm = _Norm(size, eps)
        self.lm_head = nn.Linear(size, num_known, bias=False)

    def step(self, embedded: Tensor, hidden: Tensor, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, T, size] before the last norm."""
        layer: Any = self.midlayer
        x = torch.cat([layer["input_layernorm"](embedded), layer["hidden_norm"](hidden)], dim=-1)
        attention = layer["self_attn"]
        queries, keys, values = (
            attention[f"{name}_proj"](x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for name in "qkv"
        )
        attended = F.scaled_dot_product_attention(rotate(queries), rotate(keys), values, is_causal=True)
        hidden = hidden + attention["o_proj"](attended.transpose(1, 2).flatten(2))
        x, mlp = layer["post_attention_layernorm"](hidden), layer["mlp"]
        added: Tensor = mlp["down_proj"](F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))
        return hidden + added


def _write_eagle_head(target: Any, model: Path, seen: Sequence[_Seen], folder: Path, num_steps: int) -> None:
    config = target.config
    size, head_dim = config.hidden_size, 32
    known, index_of = _known_tokens(seen, config.vocab_size)
    eps, theta = config.rms_norm_eps, 10_000.0
    layers = _layers_read(config.num_hidden_layers)
    head = _EagleHead(size, len(layers), len(known), size // head_dim, eps)
    embed = target.get_input_embeddings()

    def loss_of(each: _Seen) -> Tensor:
        rotate = _rotation(each.ids.shape[1] - 1, head_dim, theta)
        hidden = head.fc(torch.cat(list(each.streams), dim=-1)[:, :-1])
        embedded = embed(each.ids[:, 1:])
        loss = torch.zeros(())
        # The second time over its own hidden states, as it goes on from them.
        for ahead in range(2):
            hidden = head.step(embedded, hidden, rotate)
            logits = head.lm_head(head.norm(hidden))[:, : -1 - ahead]
            wanted = each.ids[:, 2 + ahead :]
            is_real = each.is_real[:, 2 + ahead :]
            loss = loss + F.cross_entropy(logits[:, : wanted.shape[1]][is_real], index_of[wanted[is_real]])
            hidden = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        return loss

    _train(head, seen, loss_of, num_steps)
    content = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": 2 * size,
        "num_hidden_layers": 1,
        "num_attention_heads": size // head_dim,
        "num_key_value_heads": size // head_dim,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": len(known),
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": layers,
    }
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    tensors["d2t"] = known - torch.arange(len(known))
    _write(folder, model, content, tensors)


class _MtpHead(nn.Module):
    """What joins the inputs of a head whose layer is the model's last, and the head's last norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = (_Norm(size, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)

    def forward(self, target: Any, ids: Tensor, last: Tensor) -> Tensor:
        """[B, T - 1, size], what logits of the tokens two after each are computed from."""
        embedded = target.get_input_embeddings()(ids[:, 1:])
        # The first token of a text is not seen, as in serving.
        embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], dim=1)
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(last[:, :-1])], dim=-1))
        found: Tensor = self.norm(_run_layer(target, target.model.layers[-1], x))
        return found


def _write_mtp_head(target: Any, model: Path, seen: Sequence[_Seen], folder: Path, num_steps: int) -> None:
    config = target.config
    last = config.num_hidden_layers - 1
    known, index_of = _known_tokens(seen, config.vocab_size)
    rows = target.get_output_embeddings().weight[known]
    head = _MtpHead(config.hidden_size, config.rms_norm_eps)

    def loss_of(each: _Seen) -> Tensor:
        hidden = head(target, each.ids, each.last)[:, :-1]
        wanted, is_real = each.ids[:, 2:], each.is_real[:, 2:]
        return F.cross_entropy(F.linear(hidden[is_real], rows), index_of[wanted[is_real]])

    _train(head, seen, loss_of, num_steps)
    prefix = _LAYOUT.prefix.format(last + 1)
    of_last = f"model.layers.{last}."
    tensors = {
        prefix + name.removeprefix(of_last): tensor
        for name, tensor in _tensors(model)
        if name.startswith(of_last)
    }
    # A Gemma stores the weights of norms less 1.
    offset = 1.0 if config.model_type == "gemma3_text" else 0.0
    for name, found in (
        (_LAYOUT.token_norm, head.enorm.weight - offset),
        (_LAYOUT.hidden_norm, head.hnorm.weight - offset),
        (_LAYOUT.projection, head.eh_proj.weight),
        (_LAYOUT.final_norm, head.norm.weight - offset),
    ):
        tensors[f"{prefix}{name}.weight"] = found.detach().contiguous()
    shutil.copytree(model, folder, symlinks=False, copy_function=_link)
    single = folder / "model.safetensors"
    if not single.is_symlink():
        raise ValueError(f"{model} has its weights in several files")
    single.rename(folder / "model-1.safetensors")
    save_file(tensors, folder / "model-2.safetensors")
    weight_map = {name: "model-1.safetensors" for name, _ in _tensors(model)}
    weight_map |= dict.fromkeys(tensors, "model-2.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _run_layer(target: Any, layer: Any, x: Tensor) -> Tensor:
    """The target's last layer over [B, T, size], as its own forward runs it."""
    config, length = target.config, x.shape[1]
    kinds: Any = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    positions = torch.arange(length)
    is_hidden = positions[None] > positions[:, None]
    if window is not None and (not kinds or kinds[-1] == "sliding_attention"):
        is_hidden |= positions[None] <= positions[:, None] - window
    mask = torch.zeros(length, length).masked_fill(is_hidden, float("-inf"))[None, None]
    # A Gemma has a table of angles for each kind of layer.
    of_kind = (kinds[-1],) if config.model_type == "gemma3_text" else ()
    angles = target.model.rotary_emb(x, positions[None], *of_kind)
    found = layer(x, position_embeddings=angles, attention_mask=mask, position_ids=positions[None])
    return found[0] if isinstance(found, tuple) else found


def _train(
    head: nn.Module, seen: Sequence[_Seen], loss_of: Callable[[_Seen], Tensor], num_steps: int
) -> None:
    optimizer = torch.optim.Adam(head.parameters(), lr=_LEARNING_RATE)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(seen[step % len(seen)])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{type(head).__name__}: loss {losses[0]:.3f}, then {losses[-1]:.3f}", flush=True)


def _rotation(length: int, head_dim: int, theta: float) -> Callable[[Tensor], Tensor]:
    frequencies = theta ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(length)[:, None] * frequencies
    cosines, sines = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cosines + torch.cat([-second, first], dim=-1) * sines

    return rotate


def _tensors(model: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(model / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  Not a mapping.
            yield name, file.get_tensor(name)


def _write(folder: Path, model: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    for path in model.iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "generation_config")):
            _link(path, folder / path.name)


def _link(source: str | Path, target: str | Path) -> None:
    os.symlink(Path(source).resolve(), target)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="to train each head")
    options = parser.parse_args()
    texts = json.loads(options.texts.read_text())
    make_draft_checkpoints(options.model.resolve(), texts, options.folder, options.steps)


if __name__ == "__main__":
    main()
