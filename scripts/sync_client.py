"""Write the modules of `dsec/client/sync` from those of `dsec/client/aio`; with --check only compare.

Every act of the asynchronous client goes through its link, so taking the words `async` and `await` away and exchanging
the link is all there is to it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parent.parent / "src" / "dsec" / "client"
SOURCE, TARGET = CLIENT / "aio", CLIENT / "sync"

DOCS = {
    "The asynchronous SDK, a module for each service. The blocking one (`dsec.client.sync`) is generated from it.": (
        "The blocking SDK, a module for each service."
    )
}

WORDS: tuple[tuple[str, str], ...] = (
    (r"dsec\.client\.aio_link import", "dsec.client.sync_link import"),
    (r"dsec\.client\.aio\b", "dsec.client.sync"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"``async with``", "``with``"),
    (r"\bawait ", ""),
    (r"\b__aenter__\b", "__enter__"),
    (r"\b__aexit__\b", "__exit__"),
    (r"\bimport AsyncIterator\b", "import Iterator"),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"\bAsync(?=[A-Z])", ""),
)


def to_sync(source: str, name: str) -> str:
    """The blocking twin of an asynchronous source, the file ``name``."""
    says, rest = _doc(source)
    generated = f"Generated from `aio/{name}` by `scripts/sync_client.py`: do not edit."
    text = f'"""{says} {generated}"""{rest}'
    for pattern, words in WORDS:
        text = re.sub(pattern, words, text)
    return tidy(text, name)


def _doc(source: str) -> tuple[str, str]:
    """The docstring of a module, and what follows it."""
    _, says, rest = source.split('"""', 2)
    return DOCS.get(says, says), rest


def tidy(source: str, name: str) -> str:
    """As the formatter and the import sorter would have it."""
    ruff = [str(Path(sys.executable).with_name("ruff"))]
    place = ["--stdin-filename", str(TARGET / name)]
    check = [*ruff, "check", "--quiet", "--select", "I", "--fix", *place, "-"]
    sorted_ = subprocess.run(check, input=source, capture_output=True, text=True, check=True).stdout
    done = subprocess.run(
        [*ruff, "format", "--quiet", *place, "-"], input=sorted_, capture_output=True, text=True, check=True
    )
    return done.stdout


def main() -> int:
    """Write, or with --check compare."""
    wanted = {
        TARGET / one.name: to_sync(one.read_text(encoding="utf-8"), one.name) for one in SOURCE.glob("*.py")
    }
    found = {one: one.read_text(encoding="utf-8") for one in TARGET.glob("*.py")}
    stale = sorted(one for one in wanted.keys() | found.keys() if wanted.get(one) != found.get(one))
    if "--check" in sys.argv[1:]:
        for one in stale:
            print(f"{one} is not what {SOURCE} gives", file=sys.stderr)
        return 1 if stale else 0
    TARGET.mkdir(exist_ok=True)
    for one in stale:
        if one in wanted:
            one.write_text(wanted[one], encoding="utf-8")
        else:
            one.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
