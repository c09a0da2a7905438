"""Sounds become what transformers' feature extractor makes of them."""

from __future__ import annotations

import io
import json
import struct
import wave
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

from frontend_svc.media.errors import MediaRefused
from frontend_svc.media.processing.processor import Item, MediaProcessor, ModelFiles
from frontend_svc.media.processing.sound import MAX_SAMPLES, Sound, read_sound

RATE = 16000
_CONFIG = json.dumps({"model_type": "qwen2_audio"})


def tone(seconds: float, rate: int = RATE, seed: int = 0) -> np.ndarray:
    times = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(0, 0.01, times.size)
    return (0.4 * np.sin(times * 2 * np.pi * 440) + noise).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE, channels: int = 1) -> bytes:
    """16 bits a sample."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return content.getvalue()


def riff(
    kind: int, bits: int, body: bytes, *, channels: int = 1, rate: int = RATE, extra: bytes = b""
) -> bytes:
    width = bits // 8 * channels
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * width, width, bits) + extra
    chunks = b"".join(
        name + struct.pack("<I", len(part)) + part + bytes(len(part) % 2)
        for name, part in ((b"fmt ", form), (b"LIST", b"abc"), (b"data", body))
    )
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks


def processed(content: bytes, **settings: object) -> Item:
    files = ModelFiles(_CONFIG, json.dumps(settings))
    return MediaProcessor(files, "audio").process(content, max_positions=10_000)


@pytest.mark.parametrize("seconds", [0.05, 0.5, 1.2345, 30.0])
def test_spectrograms_equal_those_of_transformers(seconds: float) -> None:
    content = wav(tone(seconds))
    samples = read_sound(content).samples
    theirs = WhisperFeatureExtractor(feature_size=128)
    expected = theirs(samples, sampling_rate=RATE, return_attention_mask=True)
    item = processed(content, feature_size=128)
    padded = np.pad(samples, (0, 30 * RATE - samples.size))
    exact = theirs._np_extract_fbank_features([padded], "cpu")[0]
    assert np.abs(item.tensors["input_features"] - exact).max() <= 1e-6
    # With torch, transformers computes in 32 bits.
    assert np.abs(item.tensors["input_features"] - expected["input_features"][0]).max() <= 1e-3
    assert item.tensors["num_frames"].tolist() == [expected["attention_mask"][0].sum()]
    num = item.tensors["num_frames"][0]
    num_tokens = (((num - 1) // 2 + 1) - 2) // 2 + 1
    this = SimpleNamespace(audio_token="<|AUDIO|>")
    written = Qwen2AudioProcessor.replace_audio_token(this, {"num_audio_tokens": [num_tokens]}, 0)
    assert item.expansion.text * item.expansion.run_length == written


def test_all_widths_of_samples_are_read() -> None:
    samples = tone(0.1)
    whole = (samples * 32767).astype("<i2")
    extensible = struct.pack("<HHIHH", 22, 24, 0, 1, 0)
    wide = (whole.astype("<i4") << 8).view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    contents = {
        "pcm16": riff(1, 16, whole.tobytes()),
        "pcm24": riff(1, 24, wide),
        "pcm32": riff(1, 32, (whole.astype("<i4") << 16).tobytes()),
        "extensible24": riff(0xFFFE, 24, wide, extra=extensible),
        "float32": riff(3, 32, (whole / 32768).astype("<f4").tobytes()),
        "float64": riff(3, 64, (whole / 32768).astype("<f8").tobytes()),
        "stereo": riff(1, 16, np.repeat(whole, 2).tobytes(), channels=2),
    }
    for name, content in contents.items():
        sound = read_sound(content)
        assert sound.rate == RATE and np.array_equal(sound.samples, (whole / 32768).astype(np.float32)), name
    coarse = read_sound(riff(1, 8, (samples * 127 + 128).astype(np.uint8).tobytes())).samples
    assert np.abs(coarse - samples).max() < 0.02


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_sounds_of_other_rates_are_converted(rate: int) -> None:
    sound = read_sound(wav(tone(0.5, rate, seed=1), rate)).at_rate(RATE)
    expected = 0.4 * np.sin(np.arange(sound.samples.size) / RATE * 2 * np.pi * 440)
    middle = slice(400, -400)
    assert sound.rate == RATE and abs(sound.samples.size - RATE // 2) <= 1
    # The noise of the source stays.
    assert np.abs(sound.samples[middle] - expected[middle]).max() < 0.06


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "no WAV"),
        (b"ID3\x04\x00\x00\x00\x00\x00\x00\xff\xfb\x90\x00", "no WAV"),
        (b"RIFF\x04\x00\x00\x00WAVE", "no samples"),
        (riff(1, 16, b""), "0 samples"),
        (riff(1, 12, bytes(12)), "format 1 of 12 bits"),
        (riff(2, 4, bytes(12)), "format 2 of 4 bits"),
        (riff(1, 16, bytes(12), channels=0), "0 channels"),
        (riff(1, 16, bytes(12), rate=1), "of 1 Hz"),
        (riff(3, 32, struct.pack("<f", float("inf"))), "no numbers within"),
        (riff(3, 32, struct.pack("<f", float("nan"))), "no numbers within"),
        (riff(3, 32, struct.pack("<f", 3e38)), "no numbers within"),
        (riff(1, 8, bytes(MAX_SAMPLES + 1)), "samples, must have"),
        (b"RIFF\x04\x00\x00\x00WAVEdata\x04\x00\x00\x00abcd", "before their format"),
        (b"RIFF\x04\x00\x00\x00WAVEfmt \x04\x00\x00\x00abcd", "format of less than 16 bytes"),
    ],
)
def test_broken_sounds_are_refused(content: bytes, cause: str) -> None:
    with pytest.raises(MediaRefused, match=cause):
        read_sound(content)


def test_sounds_beyond_the_models_limits_are_refused() -> None:
    with pytest.raises(MediaRefused, match=r"has 2\.0 s, the model takes 1"):
        processed(wav(tone(2.0)), chunk_length=1)
    with pytest.raises(MediaRefused, match="160 samples, which is too short"):
        processed(wav(tone(0.01)))


def test_a_sound_that_is_too_long_is_refused_before_it_is_resampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sound, "at_rate", lambda *_: pytest.fail("at 16 kHz it has 16 times as many samples"))
    with pytest.raises(MediaRefused, match=r"the sound has 40.0 s, the model takes 30"):
        processed(wav(tone(40, rate=1000), rate=1000))
