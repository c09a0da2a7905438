"""The tokenizer pool and what is known without tokenizing."""

from __future__ import annotations

import threading

import pytest

from frontend_svc.text.tokenizer import ModelTokenizer, TokenizerPool
from service_kit.errors import ResourceExhausted
from tests.frontend_svc.tokenizers import SAMPLES, byte_level_tokenizer


async def test_work_runs_off_the_event_loop():
    pool = TokenizerPool(1)
    assert await pool.run(threading.get_ident) != threading.get_ident()
    pool.close()


async def test_work_over_its_time_is_refused_with_the_limit():
    pool = TokenizerPool(1, time_limit_s=0.01)
    release = threading.Event()
    with pytest.raises(ResourceExhausted, match=r"limit of 0\.01 s"):
        await pool.run(release.wait)
    release.set()
    pool.close()


@pytest.mark.parametrize("sample", SAMPLES)
async def test_the_lower_bound_holds(sample):
    pool = TokenizerPool(1)
    tokenizer = ModelTokenizer(byte_level_tokenizer(), pool)
    ids = await tokenizer.encode(sample * 20, add_special_tokens=True)
    assert 0 < tokenizer.min_num_tokens(sample * 20) <= len(ids)
    pool.close()


async def test_settings_of_a_tokenizer_file_do_not_cut_prompts():
    raw = byte_level_tokenizer()
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    pool = TokenizerPool(1)
    tokenizer = ModelTokenizer(raw, pool)
    text = "the cat sat on the mat and the dog"
    ids = await tokenizer.encode(text, add_special_tokens=True)
    assert await tokenizer.decode(ids, skip_special_tokens=False) == text
    pool.close()
