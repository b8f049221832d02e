"""Twenty sandboxes at once, from asyncio: each runs a program of its own and knows nothing of the others."""

from __future__ import annotations

import asyncio
import os

from dsec import AsyncDsec

LEVEL = "container" if os.geteuid() == 0 else "process"


async def squared(engine: AsyncDsec, number: int) -> int:
    async with await engine.sandboxes.create(level=LEVEL, ttl=60) as sandbox:
        await sandbox.files.write("number", str(number).encode())
        result = await sandbox.exec(["sh", "-c", "n=$(cat number); echo $((n * n)); ls | wc -l"], timeout=30)
        square, files = result.text.split()
        assert int(files) <= 3, "somebody else's files"
        return int(square)


async def main() -> None:
    engine = AsyncDsec()
    async with engine:
        squares = await asyncio.gather(*(squared(engine, number) for number in range(20)))
    print(squares)
    assert squares == [number * number for number in range(20)]


if __name__ == "__main__":
    asyncio.run(main())
