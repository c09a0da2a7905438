"""Creates the tokenizer.json of a model folder that has a tokenizer.model.

`python -m triptych_cli.convert_tokenizer FOLDER`, run by frontends and usable by hand. Needs the extra
`slow-tokenizers`; without it the exit code is 3.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

_MISSING_EXTRA = 3
_LIBRARIES = ("transformers", "sentencepiece", "tiktoken")


def main(argv: Sequence[str]) -> int:
    """Convert the tokenizer of the folder `argv[0]`. Returns the exit code."""
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        print(f"not installed: {names}; the extra slow-tokenizers has them", file=sys.stderr)
        return _MISSING_EXTRA
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(argv[0], local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        print(f"{type(tokenizer).__name__} cannot be saved as tokenizer.json", file=sys.stderr)
        return 1
    tokenizer.backend_tokenizer.save(f"{argv[0]}/tokenizer.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
