"""A run of the soak: homes one after another, as long as there is time, and what came of it."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec import Dsec, Settings
from dsec.testing.crashes import RESTART
from dsec.testing.databases import POSTGRESQL
from dsec.testing.postgres import database, server
from dsec.testing.soak.house import House, Told

LEVELS: Final = {"container": ("container",), "process": ("process",), "both": ("container", "process")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked of a run.

    Attributes:
        seed: of everything that chance decides. first: the number of the first round.
        rounds: how many, 0 = as many as ``minutes`` have room for. home: rounds after which a home is taken down and another one begins.
        database: ``sqlite`` or ``postgresql``. level: one, or ``both``. restart: seconds within which a server must be back.
        directory: for homes and images, None = a new one.
    """

    seed: int
    first: int = 0
    rounds: int = 0
    minutes: float = 10.0
    home: int = 20
    database: str = "sqlite"
    level: str = "both"
    restart: float = RESTART
    directory: Path | None = None


def soak(wish: Wish, told: Told, say: Callable[[str], None]) -> None:
    """Do it, until the first violation.

    Args:
        told: is filled, also when this raises. say: is told of each round.
    """
    begun = time.monotonic()
    number = wish.first
    with ExitStack() as stack:
        top = _place(wish)
        address = stack.enter_context(server()) if wish.database == POSTGRESQL else ""
        say(f"in {top}")
        images = _images(top, LEVELS[wish.level][0])
        while _more(wish, number, begun) and not told.wrong:
            with database(address) if address else nullcontext("") as url:
                number = _in_one_home(wish, told, say, (top / f"h{number}", images, url, number, begun))
            told.seconds = time.monotonic() - begun
    if wish.directory is None and not told.wrong:
        shutil.rmtree(top, ignore_errors=True)


def _in_one_home(
    wish: Wish, told: Told, say: Callable[[str], None], where: tuple[Path, Path, str, int, float]
) -> int:
    """The number of the next round."""
    path, images, url, number, begun = where
    house = House(path, images, url, _free_port(), LEVELS[wish.level], wish.seed, told, wish.restart)
    last = number + wish.home
    try:
        while number < last and _more(wish, number, begun):
            right = house.round(number)
            say(
                f"round {number}: {'right' if right else 'WRONG'}; {told.rounds} rounds, {sum(told.acts.values())} acts"
            )
            number += 1
            if not right:
                break
        else:
            house.close()
    finally:
        house.remove()
    if not told.wrong:
        house.erase()
    return number


def _more(wish: Wish, number: int, begun: float) -> bool:
    if wish.rounds:
        return number < wish.first + wish.rounds
    return time.monotonic() - begun < 60 * wish.minutes


def _place(wish: Wish) -> Path:
    """A short path, because sockets lie below it; those of others may pass, because witnesses do."""
    top = wish.directory or Path(tempfile.mkdtemp(prefix="dsec-soak-"))
    top.mkdir(parents=True, exist_ok=True)
    top.chmod(0o711)
    return top.resolve()


def _images(top: Path, level: str) -> Path:
    store = top / "images"
    with Dsec(settings=Settings(images=store, pool=0)) as dsec:
        dsec.sandboxes.create(level=level).destroy()
    return store


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
