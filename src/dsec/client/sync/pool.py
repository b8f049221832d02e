"""Sandboxes that are kept ready. Generated from `aio/pool.py` by `scripts/sync_client.py`: do not edit."""

from __future__ import annotations

from dsec.client.requests import BASE, spec_of
from dsec.client.sync_link import Link
from dsec.model.checks import check_count, check_text
from dsec.model.pool import PoolInfo
from dsec.model.sandbox import Level, Limits


class Pool:
    """The ready sandboxes of an engine: whole ones that nobody has used, so that creating one is claiming one.

    How many there are of which kind follows from what is asked for, within ``Settings.pool`` and ``Settings.pool_memory``.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def info(self) -> PoolInfo:
        """What it holds now, and how many creates since the engine was opened found one ready."""
        return self._link.call(self._link.services.pool.info())

    def warm(
        self,
        template: str = BASE,
        count: int = 1,
        *,
        level: Level | str | None = None,
        limits: Limits | None = None,
        read_only: bool = False,
    ) -> int:
        """Have sandboxes ready before anybody asks for them. They stay until nobody has asked for their kind for five minutes.

        Args:
            template: "base" or a built template. level, limits, read_only: as they will be asked for; another one is another kind.
            count: ready ones, 0 = no more than arrivals call for.

        Returns:
            How many are ready: fewer than ``count`` where the memory that the pool may take is used up.

        Raises:
            BadRequest: an argument; more than ``Settings.pool``. NotFound: the template.
            Unsupported: this engine keeps none ready. As :meth:`Sandboxes.create`.
        """
        check_text("template", template)
        check_count("count", count, 0, 1000)
        templates = self._link.services.templates
        spec = spec_of(
            None if template == BASE else self._link.call(templates.find(template)),
            level=level,
            limits=limits,
            ttl=0.0,
            idle=0.0,
            read_only=read_only,
            env=None,
            volumes=(),
            labels=None,
        )
        return self._link.call(self._link.services.pool.warm(spec, count))
