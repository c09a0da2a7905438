"""The bar that people see while prompts are answered."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """Prompts done and tokens per second, on stderr. `tick` may come from any thread."""

    def __init__(
        self, title: str, num_prompts: int, *, is_shown: bool, console: Console | None = None
    ) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            disable=not is_shown,
        )
        self._task = self._progress.add_task(title, total=num_prompts, speed="")
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0

    def tick(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """One more prompt has its answer."""
        self._num_prompt_tokens += num_prompt_tokens
        self._num_output_tokens += num_output_tokens
        elapsed_s = self._progress.tasks[0].elapsed or 0.0
        speed = ""
        if elapsed_s > 0:
            speed = (
                f"{self._num_prompt_tokens / elapsed_s:,.0f} tokens/s in, "
                f"{self._num_output_tokens / elapsed_s:,.0f} tokens/s out"
            )
        self._progress.update(self._task, advance=1, speed=speed)

    def __enter__(self) -> Self:
        """Show the bar."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave it as it stands."""
        self._progress.stop()
