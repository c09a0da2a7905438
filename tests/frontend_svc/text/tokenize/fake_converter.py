"""A scripted converter: `fake_converter.py DEED DIARY FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from frontend_svc.text.tokenize.slow_tokenizer import MISSING_EXTRA


def main() -> int:
    deed, diary, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    diary.write_text((diary.read_text() if diary.exists() else "") + f"{folder}\n")
    if deed == "converts":
        names = ("tokenizer.model", "tokenizer_config.json")
        content = b"+".join((folder / name).read_bytes() for name in names)
        (folder / "tokenizer.json").write_bytes(content)
    if deed == "hangs":
        sys.stdin = None
        while True:
            pass
    if deed == "fails":
        print("line one\nno such model type", file=sys.stderr)
        return 1
    return MISSING_EXTRA if deed == "misses its extra" else 0


if __name__ == "__main__":
    raise SystemExit(main())
