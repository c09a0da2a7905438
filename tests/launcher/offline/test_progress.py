from __future__ import annotations

import io

from rich.console import Console

from launcher.offline.progress import Bar


def _shown(*, is_shown: bool) -> str:
    out = io.StringIO()
    with Bar("Generating", 3, is_shown=is_shown, console=Console(file=out, width=200)) as bar:
        for _ in range(3):
            bar.tick(10, 20)
    return out.getvalue()


def test_the_bar_tells_prompts_done_and_tokens_per_second() -> None:
    text = _shown(is_shown=True)
    assert "Generating" in text
    assert "3/3" in text
    assert "tokens/s in" in text
    assert "tokens/s out" in text


def test_a_bar_that_is_not_wanted_writes_nothing() -> None:
    assert _shown(is_shown=False) == ""
