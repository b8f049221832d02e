"""The pool of ready sandboxes, as clients see it."""

from __future__ import annotations

from dsec.errors import BadRequest, Unsupported
from dsec.model.checks import check_count
from dsec.model.pool import PoolInfo
from dsec.model.sandbox import SandboxSpec
from dsec.node.lifecycle import Lifecycle
from dsec.node.pool import Pool
from dsec.node.ready import ReadyRuntime
from dsec.ports.engine import PoolService


class Pooling(PoolService):
    """Figures of a pool, and sandboxes made ahead because somebody asked for it. ``pool``: None = there is none."""

    def __init__(self, pool: Pool | None, lifecycle: Lifecycle) -> None:
        self._pool = pool
        self._lifecycle = lifecycle

    async def info(self) -> PoolInfo:
        """See :class:`PoolService`."""
        return PoolInfo() if self._pool is None else self._pool.info()

    async def warm(self, spec: SandboxSpec, count: int) -> int:
        """See :class:`PoolService`.  Raises: BadRequest: more than the pool has places."""
        runtime = self._lifecycle.runtime(spec.level)
        if self._pool is None or not isinstance(runtime, ReadyRuntime):
            raise Unsupported("this engine keeps no sandboxes ready", hint="open the engine with a pool")
        if spec.volumes:
            raise Unsupported("volumes: sandboxes with volumes are not made ahead", hint="leave volumes out")
        check_count("count", count, 0, 2**31)
        if count > self._pool.kinds.places:
            raise BadRequest(
                f"count: {count} is more than the {self._pool.kinds.places} sandboxes that this engine keeps ready",
                hint="open the engine with a larger pool",
            )
        return await runtime.warm(await runtime.pin(spec), count)
