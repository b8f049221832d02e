"""Write `dsec/client/sync.py` from `dsec/client/aio.py`; with --check only compare.

Every act of the asynchronous client goes through its link, so taking the words `async` and `await` away and exchanging
the link is all there is to it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parent.parent / "src" / "dsec" / "client"
SOURCE, TARGET = CLIENT / "aio.py", CLIENT / "sync.py"
DOC = '"""The blocking SDK. Generated from `aio.py` by `scripts/sync_client.py`: do not edit."""'

WORDS: tuple[tuple[str, str], ...] = (
    (r"\A\"\"\".*?\"\"\"", DOC),
    (r"dsec\.client\.aio_link import AsyncLink, Connect", "dsec.client.sync_link import Connect, Link"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"``async with``", "``with``"),
    (r"\bawait ", ""),
    (r"\b__aenter__\b", "__enter__"),
    (r"\b__aexit__\b", "__exit__"),
    (r"\bimport AsyncIterator\b", "import Iterator"),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"\bAsync(?=[A-Z])", ""),
)


def to_sync(source: str) -> str:
    """The blocking twin of an asynchronous source."""
    for pattern, words in WORDS:
        source = re.sub(pattern, words, source, flags=re.DOTALL)
    return tidy(source)


def tidy(source: str) -> str:
    """As the formatter and the import sorter would have it."""
    ruff = [str(Path(sys.executable).with_name("ruff"))]
    name = ["--stdin-filename", str(TARGET)]
    check = [*ruff, "check", "--quiet", "--select", "I", "--fix", *name, "-"]
    sorted_ = subprocess.run(check, input=source, capture_output=True, text=True, check=True).stdout
    done = subprocess.run(
        [*ruff, "format", "--quiet", *name, "-"], input=sorted_, capture_output=True, text=True, check=True
    )
    return done.stdout


def main() -> int:
    """Write, or with --check compare."""
    wanted = to_sync(SOURCE.read_text(encoding="utf-8"))
    found = TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""
    if wanted == found:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{TARGET} is not what {SOURCE} gives", file=sys.stderr)
        return 1
    TARGET.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
