"""The documentation is true: what it shows is run.

In README.md and the pages for users, every ``python`` block is run as a program of its own, and all ``sh`` blocks of a page are
run as one script. A ``text`` block right after one of them is the output it must have; a line ``...`` stands for any number of
lines, and ``...`` within a line for any text. ``console`` blocks are not run. Links to files must lead somewhere.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsec.testing.serving import stop_server_of

ROOT = Path(__file__).parents[2]
USER_PAGES = [page for part in ("tutorial", "how-to") for page in sorted((ROOT / "docs" / part).glob("*.md"))]
NOT_RUN = ("inspect-ai.md",)  # parts of an eval, which needs a model
RUN = [ROOT / "README.md", *[page for page in USER_PAGES if page.name not in NOT_RUN]]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")
MARK = "--- end of a block ---"


@dataclass(frozen=True)
class Block:
    """A program, its language, the line it starts on, and the output it must have, if the page says one."""

    language: str
    text: str
    line: int
    output: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    fences = list(FENCE.finditer(text))
    found = []
    for this, following in zip(fences, [*fences[1:], None], strict=True):
        output = None
        if following and following[1] == "text" and not text[this.end() : following.start()].strip():
            output = following[2]
        found.append(Block(this[1], this[2], text.count("\n", 0, this.start()) + 2, output))
    return found


def pattern(output: str) -> re.Pattern[str]:
    lines = [
        r"(?:.*\n)*?" if line == "..." else ".*?".join(map(re.escape, line.split("..."))) + r"\n"
        for line in output.splitlines()
    ]
    return re.compile("".join(lines))


def check(page: Path, block: Block, said: str) -> None:
    if block.output is not None:
        assert pattern(block.output).fullmatch(said), (
            f"{page.name}:{block.line} says:\n{block.output}\nbut it was:\n{said}"
        )


@pytest.fixture
def run(image_store: Path, tmp_path: Path) -> Iterator[object]:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "store").symlink_to(image_store)
    here = tmp_path / "here"
    here.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "DSEC_HOME": str(tmp_path / "home"), "PATH": path}

    def start(*command: str) -> str:
        done = subprocess.run(
            command, cwd=here, env=env, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    yield start
    stop_server_of(tmp_path / "home")


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.parametrize(
    ("page", "block"),
    [pytest.param(p, b, id=f"{p.stem}:{b.line}") for p in RUN for b in blocks(p) if b.language == "python"],
)
def test_python(page: Path, block: Block, run: object) -> None:
    assert callable(run)
    check(page, block, run(sys.executable, "-W", "error", "-c", block.text))


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.stem) for p in RUN if any(b.language == "sh" for b in blocks(p))]
)
def test_sh(page: Path, run: object) -> None:
    assert callable(run)
    script = [block for block in blocks(page) if block.language == "sh"]
    said = run("bash", "-euc", f"\necho '{MARK}'\n".join(block.text for block in script))
    for block, part in zip(script, said.split(MARK + "\n"), strict=True):
        check(page, block, part)


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in PAGES])
def test_links(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing
