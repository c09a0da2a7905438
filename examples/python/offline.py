"""Answers a few prompts without any server: `python offline.py [MODEL]`. MODEL is a folder or a hub name."""

from __future__ import annotations

import sys

from triptych import LLM, SamplingParams
from triptych_cli.services import embedded_model

PROMPTS = ["Once upon a time", "The owl is in the", "Tell me about the fox."]


def main() -> None:
    """Complete every prompt twice, in one batch."""
    model = sys.argv[1] if len(sys.argv) > 1 else str(embedded_model())
    with LLM(model) as llm:
        params = SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=40)
        for result in llm.generate(PROMPTS, params):
            print(result.prompt)
            for output in result.outputs:
                print(f"  {output.index}: {output.text!r} ({output.finish_reason})")


if __name__ == "__main__":
    main()
