"""What an evaluation can say about its sandboxes, checked before anything is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from dsec.model.sandbox import Level, Limits, SandboxSpec

MAX_CONFIG_BYTES: Final = 1 << 20
MAX_ENVIRONMENTS: Final = 64

_STRICT: Final = ConfigDict(frozen=True, extra="forbid")
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


class LimitsConfig(BaseModel):
    """Hard ceilings of a sandbox, as :class:`dsec.Limits`; what is left out has that class's default.

    ``output_bytes`` left out follows Inspect's own limit of exec output.
    """

    model_config = _STRICT

    cpu_millis: int | None = None
    memory_mib: int | None = None
    pids: int | None = None
    disk_mib: int | None = None
    open_files: int | None = None
    output_bytes: int | None = None

    @model_validator(mode="after")
    def _bounds(self) -> LimitsConfig:
        self.limits(output_bytes=0)
        return self

    def limits(self, *, output_bytes: int) -> Limits:
        """The limits; ``output_bytes`` is used when the configuration does not say.  Raises: BadRequest."""
        return Limits(**{"output_bytes": output_bytes, **self.model_dump(exclude_none=True)})


class SandboxConfig(BaseModel):
    """One sandbox.

    Attributes:
        level: ``container`` or ``process``; one that this machine cannot give is an error, never lowered.
        base: what its file system starts from.
        user: who runs commands and touches files unless a call names somebody else; ``root`` needs level ``container``.
        env: variables of every command.
        read_only: only the working directory, the home directory and /tmp can be written.
    """

    model_config = _STRICT

    level: Level = Level.CONTAINER
    base: str = "base"
    user: Literal["", "user", "root"] = ""
    limits: LimitsConfig = LimitsConfig()
    env: dict[str, str] = Field(default_factory=dict)
    read_only: bool = False

    @field_validator("env")
    @classmethod
    def _env(cls, env: dict[str, str]) -> dict[str, str]:
        SandboxSpec(env=env)  # its check names the bad variable
        return env

    @model_validator(mode="after")
    def _user_exists(self) -> SandboxConfig:
        if self.user and self.level is Level.PROCESS:
            raise ValueError("user: level 'process' runs every command as one user; leave `user` out")
        return self

    def __hash__(self) -> int:
        """Inspect keeps configurations in sets."""
        return hash(self.model_dump_json())


class DsecSandboxConfig(SandboxConfig):
    """Configuration of ``SandboxEnvironmentSpec("dsec", …)``.

    Attributes:
        environments: named sandboxes, each with the fields above; a field it does not set is that of this object. Empty =
            one, named ``default``. The first is the default unless one is named ``default``.
    """

    environments: dict[_Name, SandboxConfig] = Field(default_factory=dict, max_length=MAX_ENVIRONMENTS)

    __hash__ = SandboxConfig.__hash__

    def sandboxes(self) -> dict[str, SandboxConfig]:
        """Every sandbox by name, the default one first."""
        mine = {name: getattr(self, name) for name in SandboxConfig.model_fields}
        if not self.environments:
            return {"default": SandboxConfig(**mine)}
        found = {
            name: SandboxConfig(**{**mine, **{field: getattr(one, field) for field in one.model_fields_set}})
            for name, one in self.environments.items()
        }
        return {name: found[name] for name in sorted(found, key=lambda name: name != "default")}

    @model_validator(mode="after")
    def _together(self) -> DsecSandboxConfig:
        self.sandboxes()
        return self


def config_of(config: BaseModel | str | None) -> DsecSandboxConfig:
    """The configuration that Inspect hands over: none, an object, or the path of a JSON file.

    Raises:
        ValueError: it is not a valid configuration; the message names the field.
        OSError: the file cannot be read.
    """
    if config is None:
        return DsecSandboxConfig()
    if isinstance(config, DsecSandboxConfig):
        return config
    if isinstance(config, str):
        return _from_file(Path(config))
    raise ValueError(
        f"sandbox config: {type(config).__name__} is not a DsecSandboxConfig or the path of a JSON file"
    )


def _from_file(path: Path) -> DsecSandboxConfig:
    if path.suffix != ".json":
        raise ValueError(f"sandbox config: {path} is not a .json file")
    with path.open("rb") as file:
        text = file.read(MAX_CONFIG_BYTES + 1)
    if len(text) > MAX_CONFIG_BYTES:
        raise ValueError(f"sandbox config: {path} is larger than {MAX_CONFIG_BYTES} bytes")
    return DsecSandboxConfig.model_validate(json.loads(text))
