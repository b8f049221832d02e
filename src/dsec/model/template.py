"""What a template says: the blueprint of an environment. A sandbox is one run of it.

Every value is checked when it is made; the rule of a field stands beside its type. What of it is enforced today, and what is only declared,
is told by :mod:`dsec.templates.enforcement`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Final

from dsec.errors import BadRequest
from dsec.model import template_checks as checks
from dsec.model.sandbox import WORKSPACE, Hibernate, Level, Limits, Volume


class Profile(StrEnum):
    """What an agent typically does, and so what it needs: a set of limits to begin with."""

    DEFAULT = "default"  # the limits of a sandbox that was given none
    CHAT = "chat"  # talks and orchestrates, waits for models
    CODE = "code"  # runs code
    DATA = "data"  # analyses data
    BROWSER = "browser"  # works a browser


# Memory and CPU of chat, code and data are measured needs of such agents: half a CPU and 256 MiB; 2 to 4 CPUs and 1 to 2 GiB (a ceiling takes
# the upper end); from 4 GiB of memory. The rest is ours: a browser has many processes, and shared memory for what it displays.
PROFILES: Final[Mapping[Profile, Limits]] = MappingProxyType(
    {
        Profile.DEFAULT: Limits(),
        Profile.CHAT: Limits(cpu_millis=500, memory_mib=256),
        Profile.CODE: Limits(cpu_millis=4000, memory_mib=2048, pids=512, disk_mib=4096),
        Profile.DATA: Limits(cpu_millis=4000, memory_mib=4096, pids=512, disk_mib=10_240),
        Profile.BROWSER: Limits(cpu_millis=2000, memory_mib=2048, pids=1024, disk_mib=4096, open_files=4096),
    }
)


class MemoryType(StrEnum):
    """How an agent remembers."""

    NONE = "none"
    LAYERED = "layered"  # a short-term and a long-term store


class Fresh(StrEnum):
    """A place that is new for every run. There is no other kind."""

    FRESH = "fresh"


class NewSession(StrEnum):
    """A ``SESSION_ID`` that is new for every run. There is no other kind."""

    NEW = "new"


class SharedVolumes(StrEnum):
    """Whether runs of a template can leave something for one another in its volumes."""

    NONE = "none"  # every volume is read-only
    SHARED = "shared"  # what one run writes in a volume, the next one finds


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What a sandbox begins with, and where and as whom its commands run.

    Attributes:
        base: the image that its files begin as. level: how strongly it is isolated.
        dependencies: Python packages to install (PEP 508). packages: Debian packages to install, ``name`` or ``name=version``.
        setup: commands for a shell, run in order when the template is built, after packages and dependencies.
        env: variables of every command. user: who runs commands. workdir: where they run, a path inside.
    """

    base: Annotated[str, checks.check_base] = "system"
    level: Level = Level.CONTAINER
    dependencies: tuple[Annotated[str, checks.check_requirement], ...] = ()
    packages: tuple[Annotated[str, checks.check_package], ...] = ()
    setup: tuple[Annotated[str, checks.check_command], ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    user: Annotated[str, checks.check_user_name] = "user"
    workdir: Annotated[str, checks.check_directory] = WORKSPACE

    def __post_init__(self) -> None:
        checks.check_fields("runtime", self)
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))  # the caller's may change later


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What an agent may call.

    Attributes:
        allowed: names of tools. What is not named is not allowed.
    """

    allowed: tuple[Annotated[str, checks.check_tool], ...] = ()

    def __post_init__(self) -> None:
        checks.check_fields("tools", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Where an agent remembers.

    Attributes:
        type: how an agent remembers. short_term: URL of a store, without a password, "" = none. long_term: the same.
    """

    type: MemoryType = MemoryType.NONE
    short_term: Annotated[str, checks.check_store] = ""
    long_term: Annotated[str, checks.check_store] = ""

    def __post_init__(self) -> None:
        checks.check_fields("memory", self)
        for fault in memory_faults(self.type, short_term=self.short_term, long_term=self.long_term):
            raise fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """The bounds of an agent's run. An agent without them can go on, and cost, without end.

    Attributes:
        model: the model that decides, "" = none is named.
        max_steps: acts of the agent in one run. max_seconds: of one run. max_cost_usd: of one run in US dollars, 0 = no ceiling.
        timezone: of its clocks, a name of the IANA data base.
    """

    model: Annotated[str, checks.check_model] = ""
    max_steps: Annotated[int, checks.check_steps] = 30
    max_seconds: Annotated[float, checks.check_duration] = 600.0
    max_cost_usd: Annotated[float, checks.check_cost] = 0.0
    timezone: Annotated[str, checks.check_zone] = "UTC"

    def __post_init__(self) -> None:
        checks.check_fields("strategy", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a sandbox may use at most.

    Attributes:
        profile: the limits to begin with; those that are given beside it override them. limits: what holds.
    """

    profile: Profile = Profile.DEFAULT
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        checks.check_fields("resources", self)

    @classmethod
    def of(cls, profile: Profile, **limits: int) -> Resources:
        """The limits of a profile, but for those that are given.  Raises: BadRequest: one is out of bounds."""
        checks.check_value("resources.profile", Profile, profile)
        unknown = sorted(limits.keys() - set(Limits.__dataclass_fields__))
        if unknown:
            raise BadRequest(
                f"resources.{unknown[0]}: there is no such limit",
                hint=f"one of {', '.join(Limits.__dataclass_fields__)}",
                field=f"resources.{unknown[0]}",
            )
        return cls(profile=profile, limits=replace(PROFILES[profile], **limits))


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What a sandbox may reach beside its own loopback.

    Attributes:
        allow: hosts, each as a name, ``*.`` and a name, or an address, with or without ``:port``. What is not named is not allowed.
    """

    allow: tuple[Annotated[str, checks.check_endpoint], ...] = ()

    def __post_init__(self) -> None:
        checks.check_fields("network", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What of a run the next run of the same template finds: nothing, unless it says so here.

    Attributes:
        workdir: the working directory is new for every run. tmp: /tmp is new for every run. session_id: ``SESSION_ID`` is new for every run.
        volumes: whether one run may find in a volume what another wrote. scratch_exec: every command runs in a throw-away copy of the sandbox.
        hibernate: when a sandbox that nobody uses may be reduced to its files: without processes of its own, also with (``files``: they end), or never.
    """

    workdir: Fresh = Fresh.FRESH
    tmp: Fresh = Fresh.FRESH
    session_id: NewSession = NewSession.NEW
    volumes: SharedVolumes = SharedVolumes.NONE
    scratch_exec: bool = False
    hibernate: Hibernate = Hibernate.AUTO

    def __post_init__(self) -> None:
        checks.check_fields("isolation", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The blueprint of an environment.

    Attributes:
        name: of the environment: 1 to 64 of a-z, 0-9 and, within, ``.``, ``_`` and ``-``. version: of the blueprint, in the author's own counting.
        runtime, tools, memory, strategy, resources, network, isolation: see there.
        volumes: named ones, and what of the host is shown inside. skills: names of skills that the agent has.

    Raises:
        BadRequest: the message names the field.
    """

    name: Annotated[str, checks.check_template_name]
    version: Annotated[str, checks.check_version]
    runtime: Runtime = field(default_factory=Runtime)
    tools: Tools = field(default_factory=Tools)
    memory: Memory = field(default_factory=Memory)
    strategy: Strategy = field(default_factory=Strategy)
    resources: Resources = field(default_factory=Resources)
    volumes: tuple[Volume, ...] = ()
    network: Network = field(default_factory=Network)
    isolation: Isolation = field(default_factory=Isolation)
    skills: tuple[Annotated[str, checks.check_name], ...] = ()

    def __post_init__(self) -> None:
        checks.check_fields("", self)
        for index, volume in enumerate(self.volumes):
            checks.check_plain_text(f"volumes[{index}].source", str(volume.source))
            checks.check_plain_text(f"volumes[{index}].target", volume.target)
        for fault in volume_faults(self.volumes, self.isolation.volumes):
            raise fault


def memory_faults(type: MemoryType, **stores: str) -> Iterator[BadRequest]:
    """What ``memory.type`` and the stores say against one another."""
    for name, url in stores.items():
        if url and type is MemoryType.NONE:
            yield BadRequest(
                f"memory.{name}: there is a store, and memory.type is none",
                hint="memory.type: layered",
                field=f"memory.{name}",
            )


def volume_faults(volumes: Sequence[Volume | None], shared: SharedVolumes) -> Iterator[BadRequest]:
    """What volumes say against one another and against ``isolation.volumes``; None = one that is not known."""
    for index, volume in enumerate(volumes):
        if volume is None:
            continue
        name = f"volumes[{index}]"
        if not volume.read_only and shared is SharedVolumes.NONE:
            yield BadRequest(
                f"{name}: one run finds in it what another wrote, and isolation.volumes is none",
                hint="read_only: true here, or isolation.volumes: shared",
                field=name,
            )
        within = next((n for n in range(index) if _overlap(volume, volumes[n])), None)
        if within is not None:
            yield BadRequest(
                f"{name}: {volume.target!r} and the target of volumes[{within}] lie in one another",
                hint="give each a place of its own, or show one directory that holds both",
                field=name,
            )


def _overlap(one: Volume, other: Volume | None) -> bool:
    if other is None:
        return False
    return f"{one.target}/".startswith(f"{other.target}/") or other.target.startswith(f"{one.target}/")
