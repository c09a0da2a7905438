"""Qwen2-Audio: log-mel spectrograms of half a minute, with a token for each four frames of the sound."""

from __future__ import annotations

import numpy as np

from frontend_svc.media.errors import MediaRefused
from frontend_svc.media.processing.families.family import ModelSettings, Tensors
from frontend_svc.media.processing.sound import Sound, log_mel, mel_filters
from frontend_svc.media.prompt import Expansion


class Qwen2Audio:
    options: frozenset[str] = frozenset()

    def __init__(self, settings: ModelSettings) -> None:
        processor = settings.processor
        self.sampling_rate = processor.whole("sampling_rate", 16000, maximum=192_000)
        self._hop = processor.whole("hop_length", 160)
        self._length = processor.whole("n_fft", 400, minimum=2)
        self._seconds = processor.whole("chunk_length", 30)
        num_mels = processor.whole("feature_size", 80)
        self._filters = mel_filters(num_mels, self._length, self.sampling_rate)
        self.placeholder = self.token = settings.token("audio_token", "<|AUDIO|>")

    def expansion(self, num_samples: int) -> Expansion:
        limit = self._seconds * self.sampling_rate
        if num_samples > limit:
            seconds = num_samples / self.sampling_rate
            raise MediaRefused(f"the sound has {seconds:.1f} s, the model takes {self._seconds}")
        # The encoder halves the number of frames twice.
        num = ((self._num_frames(num_samples) - 1) // 2 + 1 - 2) // 2 + 1
        if num < 1:
            raise MediaRefused(f"the sound has {num_samples} samples, which is too short for the model")
        return Expansion(self.token, num)

    def tensors(self, sound: Sound) -> Tensors:
        padded = np.zeros(self._seconds * self.sampling_rate, dtype=np.float32)
        padded[: sound.samples.size] = sound.samples
        num_frames = np.array([self._num_frames(sound.samples.size)], dtype=np.int64)
        return {
            "input_features": log_mel(padded, self._filters, self._length, self._hop),
            "num_frames": num_frames,
        }

    def _num_frames(self, num_samples: int) -> int:
        """The frames that begin within the sound."""
        return -(-num_samples // self._hop)
