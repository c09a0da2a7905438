"""The names of weights of a decoder that is a part of a larger model."""

from __future__ import annotations

# By the prefixes in files of several ages, what the same weights are called where the decoder is all.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_OF_DECODER = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")


def decoder_name(name: str) -> str:
    """The name of a decoder's weight without the parts around it; other names as they are."""
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def is_of_decoder(name: str) -> bool:
    """Whether a weight, by the name that `decoder_name` returned, is one of the decoder's."""
    return name.startswith(_OF_DECODER)
