"""Runs in a sandbox: writes texts, counts their words in two processes, keeps the counts in an SQLite index."""

import multiprocessing
import random
import sqlite3
import sys
from collections import Counter
from pathlib import Path

SYLLABLES = ("ka", "lo", "mi", "ren", "sa", "tu", "vo", "zen")


def write_texts(directory: Path, count: int, words: int) -> list[Path]:
    directory.mkdir()
    chance = random.Random(7)
    paths = [directory / f"{number:03}.txt" for number in range(count)]
    for path in paths:
        text = ["".join(chance.choices(SYLLABLES, k=chance.randint(1, 3))) for _ in range(words)]
        path.write_text(" ".join(text))
    return paths


def counted(path: Path) -> Counter[str]:
    return Counter(path.read_text().split())


def count_into(results: "multiprocessing.connection.Connection", paths: list[Path]) -> None:
    results.send(sum(map(counted, paths), Counter()))


def count(paths: list[Path], processes: int) -> Counter[str]:
    """Not a Pool: that needs /dev/shm, which level `process` does not have."""
    pending = []
    for share in range(processes):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        worker = multiprocessing.Process(target=count_into, args=(theirs, paths[share::processes]))
        worker.start()
        pending.append((worker, ours))
    total: Counter[str] = Counter()
    for worker, results in pending:
        total += results.recv()
        worker.join()
    return total


def main() -> None:
    root = Path(sys.argv[1])
    total = count(write_texts(root / "texts", count=40, words=2000), processes=2)
    with sqlite3.connect(root / "index.sqlite") as index:
        index.execute("CREATE TABLE word (word TEXT PRIMARY KEY, count INTEGER NOT NULL)")
        index.executemany("INSERT INTO word VALUES (?, ?)", total.items())
    print(f"{total.total()} words, {len(total)} different")


if __name__ == "__main__":
    main()
