"""When something may be made, and how much of it a project may have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager, nullcontext

from dsec.model.admission import AdmissionInfo
from dsec.model.sandbox import SandboxSpec, State
from dsec.model.tenants import Quota


class QuotaSource(ABC):
    """What projects may have, as it stands now."""

    @abstractmethod
    def quota(self, project: str) -> Quota:
        """Of one project, from memory: asked before every sandbox. One that nobody set is ``Quota()``."""


class Admission(ABC):
    """Turns of whatever takes processor and memory to make: within :meth:`turn` it is made or woken."""

    @abstractmethod
    def turn(
        self, spec: SandboxSpec, count: int = 1, *, seen: State | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Wait for one's turn among all projects, and have it. Whoever is cancelled while he waits leaves the queue.

        Within a turn another one needs no place of its own.

        Args:
            spec: of what is made. count: how many of that. seen: what is woken is in that state, None = it is new.

        Raises:
            Busy: the queue is full, or memory is short; ``facts["retry_after"]`` says in how many seconds to ask again.
            OverQuota: the project has all that it may have.
        """

    @abstractmethod
    def info(self) -> AdmissionInfo:
        """The queue now, and what became of requests."""


class Always(Admission):
    """Everybody's turn is now: for engines that nobody shares."""

    def turn(
        self, spec: SandboxSpec, count: int = 1, *, seen: State | None = None
    ) -> AbstractAsyncContextManager[None]:
        del spec, count, seen
        return nullcontext()

    def info(self) -> AdmissionInfo:
        return AdmissionInfo()
