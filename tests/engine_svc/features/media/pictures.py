"""A tiny LLaVA, made with transformers, and prompts with pictures for it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from engine_svc.features.media.extras import (
    EncoderInput,
    MediaContent,
    MediaItems,
    PromptItem,
    digest_of,
)
from engine_svc.tensors.host_tensor import HostTensor
from tests.engine_svc.model.checkpoints import MAX_POSITION, VOCAB_SIZE

PLACEHOLDER = 150
SIZE = 12  # of a picture's edge, in pixels
NUM_OUTPUTS = 9


def make_llava(folder: Path) -> LlavaForConditionalGeneration:
    """Save a random one, whose streams are varied, and return it."""
    torch.manual_seed(3)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=SIZE,
            patch_size=4,
        ),
        text_config=LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_POSITION,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
        image_token_index=PLACEHOLDER,
        image_seq_length=NUM_OUTPUTS,
    )
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model


def picture(seed: int) -> Tensor:
    """[3, SIZE, SIZE], as a processor returns it."""
    return torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def content_of(pixels: Tensor) -> MediaContent:
    value = HostTensor("float32", tuple(pixels.shape), pixels.numpy().astype("<f4").tobytes())
    inputs = (EncoderInput("pixel_values", value),)
    return MediaContent(digest_of(inputs), inputs)


def prompt_with(*parts: int | Tensor) -> tuple[list[int], MediaItems]:
    """Token ids and pictures, in order."""
    token_ids: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, int):
            token_ids.append(part)
            continue
        items.append(PromptItem(content_of(part), len(token_ids), NUM_OUTPUTS))
        token_ids += [PLACEHOLDER] * NUM_OUTPUTS
    return token_ids, MediaItems(tuple(items))
