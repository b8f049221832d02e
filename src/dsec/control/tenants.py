"""Keys are made and revoked, projects have quotas; each act is recorded before it is done, and how it ended after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any, Final, TypeVar

from dsec.control.coins import digest_of, new_key, new_token
from dsec.control.keys import Keyring, Look
from dsec.core.machine import ENDED
from dsec.errors import BadRequest, DsecError, NotFound, SandboxFailed
from dsec.model.checks import check_count, check_seconds, check_text
from dsec.model.ids import KeyId, SandboxId, new_key_id, parse_key_id, parse_sandbox_id
from dsec.model.journal import Draft, Json, Phase
from dsec.model.sandbox import State
from dsec.model.tenants import Coinage, KeyInfo, NewKey, ProjectInfo, Quota, Scope
from dsec.model.volumes import DEFAULT_PROJECT, check_project
from dsec.ports.admission import QuotaSource
from dsec.ports.journal import Journal
from dsec.ports.tenants import KeyRecords, TenantService

CREATE: Final = "key.create"
REVOKE: Final = "key.revoke"
TOKEN: Final = "key.token"  # noqa: S105 - the name of an act
QUOTA: Final = "project.quota"
BEGIN: Final = "control.begin"
ENGINE: Final = "engine"
MOST_IN_PAGE: Final = 1000
MOST_LABEL: Final = 256
_ACTS: Final = (CREATE, REVOKE, QUOTA)
_MESSAGE: Final = 2048
_DIED: Final[Mapping[str, Json]] = {"outcome": "unknown_outcome", "message": "the engine ended meanwhile"}
Infos = tuple[KeyInfo, ...]
T = TypeVar("T")


class Tenants(TenantService, QuotaSource):
    """See the module.

    Args:
        look: what is known of a sandbox. clock: seconds since the epoch.
    """

    def __init__(
        self,
        records: KeyRecords,
        journal: Journal,
        ring: Keyring,
        look: Look,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._records = records
        self._journal = journal
        self._ring = ring
        self._look = look
        self._clock = clock
        self._projects: dict[str, ProjectInfo] = {}
        self._acts: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Know what there is, and settle what an engine that died has begun.  Raises: as the records and the journal."""
        self._projects = {info.name: info for info in await self._records.projects()}
        if DEFAULT_PROJECT not in self._projects:
            await self._put(ProjectInfo(name=DEFAULT_PROJECT, created_at=self._clock()))
        for intent in await self._journal.unanswered(ENGINE):
            if (
                intent.act in _ACTS
            ):  # a key that nobody was shown is no key; the other acts show in what there is
                if intent.act == CREATE:
                    await self._records.revoke(KeyId(intent.ref), self._clock())
                await self._say(intent.act, Phase.RESULT, intent.ref, _DIED)

    def quota(self, project: str) -> Quota:
        known = self._projects.get(project)
        return known.quota if known is not None else Quota()

    # Keys

    async def create_key(
        self,
        scope: Scope,
        *,
        project: str,
        label: str = "",
        ttl: float = 0.0,
        coinage: Coinage = Coinage.DSEC,
    ) -> NewKey:
        if scope not in (Scope.ADMIN, Scope.DEVELOPER):
            raise BadRequest(
                "scope: a key for one sandbox is made of that sandbox", hint="`dsec key token ID`"
            )
        check_project("project", project)
        _check_label(label)
        check_seconds("ttl", ttl)
        info = self._new(scope, project, label, ttl)
        return await self._whole(self._create(info, new_key(coinage), ttl))

    async def _create(self, info: KeyInfo, key: str, ttl: float) -> NewKey:
        facts: dict[str, Json] = {
            "scope": info.scope.value,
            "project": info.project,
            "label": info.label,
            "ttl": ttl,
        }
        async with self._recorded(CREATE, info.id, facts):
            if info.project not in self._projects:
                await self._put(ProjectInfo(name=info.project, created_at=info.created_at))
            await self._records.add(info, digest_of(key))
        return NewKey(key=key, info=info)

    def _new(
        self, scope: Scope, project: str, label: str, ttl: float, sandbox: SandboxId | None = None
    ) -> KeyInfo:
        now = self._clock()
        return KeyInfo(
            id=new_key_id(),
            scope=scope,
            project=project,
            label=label,
            created_at=now,
            expires_at=now + ttl if ttl else 0.0,
            sandbox=sandbox,
        )

    async def keys(self, project: str = "", *, after: str = "", limit: int = MOST_IN_PAGE) -> Infos:
        if project:
            check_project("project", project)
        check_count("limit", limit, 1, MOST_IN_PAGE)
        return await self._records.page(project, after=after, limit=limit)

    async def revoke_key(self, key: KeyId) -> KeyInfo:
        return await self._whole(self._revoke(parse_key_id(key)))

    async def _revoke(self, key: KeyId) -> KeyInfo:
        async with self._recorded(REVOKE, key, {}):
            try:
                found = await self._records.revoke(key, self._clock())
            finally:
                self._ring.forget(key)
            if found is None:
                raise NotFound(f"there is no key {key}", hint="`dsec key ls` shows those there are", key=key)
        return found

    async def token(self, sandbox: SandboxId, *, ttl: float = 0.0) -> NewKey:
        check_seconds("ttl", ttl)
        of = await self._look(parse_sandbox_id(sandbox))
        if of.state in ENDED or of.state is State.STOPPING:
            raise SandboxFailed(f"{sandbox} is {of.state}", sandbox=sandbox, state=of.state.value)
        info = self._new(Scope.SANDBOX, of.spec.project, "", ttl, sandbox)
        key = new_token()
        facts: dict[str, Json] = {"ttl": ttl, "key": info.id}
        note = Draft(chain=sandbox, act=TOKEN, phase=Phase.NOTE, ref=info.id, payload=facts)
        await self._journal.append(note)
        await self._records.add(info, digest_of(key))
        return NewKey(key=key, info=info)

    # Projects

    async def projects(self) -> tuple[ProjectInfo, ...]:
        return tuple([self._projects[name] for name in sorted(self._projects)])

    async def project(self, name: str) -> ProjectInfo:
        check_project("project", name)
        if name not in self._projects:
            raise NotFound(
                f"there is no project {name!r}",
                hint="`dsec project ls` shows those there are; `dsec project set` makes one",
                project=name,
            )
        return self._projects[name]

    async def set_quota(self, name: str, quota: Quota) -> ProjectInfo:
        check_project("project", name)
        given: object = quota
        if not isinstance(given, Quota):
            raise BadRequest("quota: this is no quota", field="quota")
        return await self._whole(
            self._set_quota(ProjectInfo(name=name, quota=quota, created_at=self._clock()))
        )

    async def _set_quota(self, info: ProjectInfo) -> ProjectInfo:
        facts: dict[str, Json] = {**asdict(info.quota)}
        async with self._recorded(QUOTA, info.name, facts):
            return await self._put(info)

    async def _put(self, info: ProjectInfo) -> ProjectInfo:
        kept = self._projects[info.name] = await self._records.put_project(info)
        return kept

    # The journal

    async def _whole(self, act: Coroutine[Any, Any, T]) -> T:
        """An act that is done to its end, whether or not whoever asked still waits: what is remembered here is as it is kept."""
        task = asyncio.get_running_loop().create_task(act)
        self._acts.add(task)
        task.add_done_callback(self._acts.discard)
        return await asyncio.shield(task)

    @asynccontextmanager
    async def _recorded(self, act: str, ref: str, facts: Mapping[str, Json]) -> AsyncIterator[None]:
        """An act, between its intent and its result."""
        await self._say(act, Phase.INTENT, ref, facts)
        try:
            yield
        except BaseException as error:
            code = error.code if isinstance(error, DsecError) else "internal"
            failed: dict[str, Json] = {"outcome": code, "message": str(error)[:_MESSAGE]}
            with suppress(DsecError):  # whoever asked hears of what failed first
                await self._say(act, Phase.RESULT, ref, failed)
            raise
        await self._say(act, Phase.RESULT, ref, {"outcome": "ok"})

    async def _say(self, act: str, phase: Phase, ref: str, facts: Mapping[str, Json]) -> None:
        await self._journal.append(Draft(chain=ENGINE, act=act, phase=phase, ref=ref, payload=facts))


async def was_used(journal: Journal) -> bool:
    """Whether keys or quotas were made since a control database was last begun on purpose."""
    begun = await journal.latest(ENGINE, BEGIN, limit=1)
    after = begun[0].seq if begun else 0
    for act in (CREATE, QUOTA):
        made = await journal.latest(ENGINE, act, limit=1)
        if made and made[0].seq > after:
            return True
    return False


def begun() -> Draft:
    """The record of a control database that is begun on purpose, without what was in another."""
    return Draft(chain=ENGINE, act=BEGIN, phase=Phase.NOTE)


def _check_label(label: str) -> None:
    check_text("label", label)
    if len(label) > MOST_LABEL:
        raise BadRequest(f"label: {len(label)} characters are more than {MOST_LABEL}", field="label")
