"""Reads sounds in WAV, and their log-mel spectrograms. Knows no model."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from frontend_svc.media.errors import MediaRefused

# A minute of two channels at 192 kHz.
MAX_SAMPLES = 1 << 25
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_WIDTHS = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64)}
# Full scale is 1, but for files with integers as floating point. Spectra of larger samples may not be finite.
_LOUDEST = 2.0**31
_HIGHEST_HZ = 8000.0
_FLOOR = 1e-10


@dataclass(frozen=True, slots=True)
class Sound:
    """Samples of one channel in -1..1, and how many there are in a second."""

    samples: NDArray[np.float32]
    rate: int

    def size_at(self, rate: int) -> int:
        """How many samples `at_rate` gives."""
        return max(1, round(self.samples.size * rate / self.rate))

    def at_rate(self, rate: int) -> Sound:
        """The same sound with another number of samples in a second; what both can hold is kept exactly."""
        if rate == self.rate:
            return self
        num, num_new = self.samples.size, self.size_at(rate)
        spectrum = np.fft.rfft(self.samples.astype(np.float64))[: num_new // 2 + 1]
        samples = np.fft.irfft(spectrum, num_new) * (num_new / num)
        return Sound(samples.astype(np.float32), rate)


@dataclass(frozen=True, slots=True)
class _Format:
    kind: int
    num_channels: int
    rate: int
    bits: int


def read_sound(content: bytes) -> Sound:
    """The sound in a WAV file, the mean of its channels. Raises MediaRefused."""
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise MediaRefused("the content is no WAV")
    form: _Format | None = None
    position = 12
    while position + 8 <= len(content):
        name, size = (
            content[position : position + 4],
            int.from_bytes(content[position + 4 : position + 8], "little"),
        )
        body = content[position + 8 : position + 8 + size]
        if name == b"fmt ":
            form = _read_format(body)
        elif name == b"data":
            if form is None:
                raise MediaRefused("the WAV has samples before their format")
            return Sound(_samples(body, form), form.rate)
        # Chunks begin at even offsets.
        position += 8 + size + size % 2
    raise MediaRefused("the WAV has no samples")


def log_mel(
    samples: NDArray[np.float32], filters: NDArray[np.float64], length: int, hop: int
) -> NDArray[np.float32]:
    """The log-mel spectrogram [mels, frames] of windows of `length` samples at each `hop`th one.

    filters: [frequencies, mels], see `mel_filters`.
    Source: Radford et al. 2022, section 2.2, as transformers' WhisperFeatureExtractor computes it.
    """
    padded = np.pad(samples, length // 2, mode="reflect").astype(np.float64)
    frames = sliding_window_view(padded, length)[::hop]
    spectrum = np.fft.rfft(frames * np.hanning(length + 1)[:-1]).astype(np.complex64)
    power = np.abs(spectrum, dtype=np.float64) ** 2.0
    logs = np.log10(np.maximum(_FLOOR, filters.T @ power.T)).astype(np.float32)[:, :-1]
    scaled: NDArray[np.float32] = (np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0
    return scaled


def mel_filters(num_mels: int, length: int, rate: int) -> NDArray[np.float64]:
    """Triangular filters [frequencies, mels] from 0 to 8 kHz, each of the same area, on Slaney's scale.

    Source: Slaney 1998, Auditory Toolbox.
    """
    edges = _hertz(np.linspace(0.0, _mels(_HIGHEST_HZ), num_mels + 2))
    frequencies = np.linspace(0, rate // 2, 1 + length // 2)
    slopes = edges[None, :] - frequencies[:, None]
    widths = np.diff(edges)
    filters = np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    scaled: NDArray[np.float64] = filters * (2.0 / (edges[2:] - edges[:-2]))[None, :]
    return scaled


def _mels(hertz: float) -> float:
    return (
        float(15.0 + np.log(hertz / 1000.0) * (27.0 / np.log(6.4)))
        if hertz >= 1000.0
        else 3.0 * hertz / 200.0
    )


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mels >= 15.0, 1000.0 * np.exp((np.log(6.4) / 27.0) * (mels - 15.0)), 200.0 * mels / 3.0)


def _read_format(body: bytes) -> _Format:
    if len(body) < 16:
        raise MediaRefused("the WAV has a format of less than 16 bytes")
    kind, num_channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", body)
    if kind == _EXTENSIBLE and len(body) >= 26:
        kind = int.from_bytes(body[24:26], "little")
    if bits not in _WIDTHS.get(kind, ()):
        raise MediaRefused(f"the WAV has format {kind} of {bits} bits, must be PCM or floating point")
    if not 1 <= num_channels <= 64 or not 1000 <= rate <= 768_000:
        raise MediaRefused(
            f"the WAV has {num_channels} channels of {rate} Hz, must have 1..64 of 1000..768000"
        )
    return _Format(kind, num_channels, rate, bits)


def _samples(body: bytes, form: _Format) -> NDArray[np.float32]:
    width = form.bits // 8 * form.num_channels
    num = len(body) // width
    if not 1 <= num <= MAX_SAMPLES // form.num_channels:
        raise MediaRefused(f"the WAV has {num} samples, must have 1..{MAX_SAMPLES // form.num_channels}")
    raw = np.frombuffer(body, dtype=np.uint8, count=num * width)
    if form.kind == _FLOAT:
        values = raw.view(f"<f{form.bits // 8}").astype(np.float32)
    elif form.bits == 8:
        values = (raw.astype(np.float32) - 128.0) / 128.0
    elif form.bits == 24:
        # The missing low byte of 32 bits.
        wide = np.zeros((raw.size // 3, 4), dtype=np.uint8)
        wide[:, 1:] = raw.reshape(-1, 3)
        values = wide.view("<i4")[:, 0].astype(np.float32) / 2.0**31
    else:
        values = raw.view(f"<i{form.bits // 8}").astype(np.float32) / 2.0 ** (form.bits - 1)
    mono: NDArray[np.float32] = values.reshape(num, form.num_channels).mean(axis=1, dtype=np.float32)
    # Also false for what is no number.
    if not (np.abs(mono) <= _LOUDEST).all():
        raise MediaRefused(f"the WAV has samples that are no numbers within {_LOUDEST:g}")
    return mono
