"""What the journal says of each act."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from operator import attrgetter
from typing import Final

from dsec.errors import BadRequest, DsecError, TooLarge
from dsec.model.checks import shown
from dsec.model.execs import Command, ExecRequest, ExecResult, Exit
from dsec.model.ids import ExecId, SandboxId, SnapshotId
from dsec.model.journal import Draft, Json, Phase
from dsec.model.sandbox import Limits, SandboxInfo
from dsec.node.output import Output

EXEC: Final = "exec"
_LIMITS: Final = tuple(Limits.__dataclass_fields__)
_limits_of: Final = attrgetter(*_LIMITS)
# A payload holds 64 KiB of JSON, in which one byte may take six: the parts of unbounded size share less than a sixth of that.
MAX_ARGV: Final = 4096
MAX_NAMES: Final = 1536
MAX_MESSAGE: Final = 2048
DECISION: Final = "decision"
MAX_DECISION: Final = 32 * 1024  # bytes of JSON, half of what a record may hold
MAX_DEPTH: Final = 32
_WHOLE: Final = 2**63  # what every reader of JSON takes


def digest(data: bytes) -> str:
    """``sha256:`` and the digest of ``data``."""
    return "sha256:" + sha256(data).hexdigest()


def created(info: SandboxInfo, files_of: SandboxId | SnapshotId | None = None) -> Draft:
    """Intent to make a sandbox. ``files_of``: what its files begin as, if that is no image."""
    spec, limits = info.spec, info.spec.limits
    payload: dict[str, Json] = {
        "level": spec.level.value,
        "base": spec.base,
        "base_digest": spec.base_digest,
        "template": spec.template,
        "ttl": spec.ttl,
        "idle": spec.idle,
        "read_only": spec.read_only,
        "session": info.session_id,
        "env": _fitting(sorted(spec.env), MAX_NAMES),
        "project": spec.project,
        "volumes": _fitting([f"{v.source}:{v.target}" for v in spec.volumes], MAX_ARGV),
        "limits": dict(zip(_LIMITS, _limits_of(limits), strict=True)),
    }
    if files_of is not None:
        payload["files_of"] = files_of
    return Draft(chain=info.id, act="sandbox.create", phase=Phase.INTENT, payload=payload)


def recorded(infos: Sequence[SandboxInfo]) -> list[Draft]:
    """Sandboxes that are recorded, all of one specification, and are made when somebody uses them."""
    first = created(infos[0])
    alike = {**first.payload, "cold": True}
    return [
        Draft(
            chain=info.id,
            act=first.act,
            phase=Phase.NOTE,
            actor=first.actor,
            payload={**alike, "session": info.session_id},
        )
        for info in infos
    ]


def failure(error: DsecError) -> dict[str, Json]:
    """An act that failed."""
    return {"outcome": error.code, "message": error.message[:MAX_MESSAGE]}


def exec_intent(sandbox: SandboxId, command: Command, request: ExecRequest) -> Draft:
    """Intent to run a command: variables by name, standard input by digest."""
    payload: dict[str, Json] = {
        "argv": _argv(command.argv),
        "cwd": command.cwd,
        "uid": command.uid,
    }
    if request.env:
        payload["env"] = _fitting(sorted(request.env), MAX_NAMES)
    if request.timeout:
        payload["timeout"] = request.timeout
    if request.stdin is not None:
        payload["stdin"] = digest(request.stdin)
    if request.pty is not None:
        payload["pty"] = True
    if request.mark:
        payload["request"] = request.mark
    return Draft(chain=sandbox, act=EXEC, phase=Phase.INTENT, ref=command.id, payload=payload)


def _argv(argv: Sequence[bytes]) -> list[Json]:
    size = sum(map(len, argv))
    if size <= MAX_ARGV:
        return [argument.decode("utf-8", "backslashreplace") for argument in argv]
    words = [argument[:MAX_ARGV].decode("utf-8", "backslashreplace") for argument in argv[:MAX_ARGV]]
    whole = digest(b"".join(b"%d:%b" % (len(argument), argument) for argument in argv))
    return [*_fitting(words, MAX_ARGV), f"[{size} bytes in all, {whole}]"]


def _fitting(words: Sequence[str], limit: int) -> list[Json]:
    """The first words, ``limit`` characters of them, and how many were left out."""
    kept: list[Json] = []
    for word in words:
        limit -= len(word)
        if limit < 0:
            return [*kept, f"[{len(words) - len(kept)} more]"]
        kept.append(word)
    return kept


def exec_result(sandbox: SandboxId, result: ExecResult, exit_: Exit, output: Output, stdin: str) -> Draft:
    """How a command ended: output by digest and size."""
    payload: dict[str, Json] = {
        "outcome": "ok",
        "exit_code": result.exit_code,
        "signal": result.signal,
        "cause": str(exit_.cause),
        "duration": round(result.duration, 6),
        "stdout_bytes": output.stdout.seen,
        "stderr_bytes": output.stderr.seen,
    }
    if result.start_errno:
        payload["start_errno"] = result.start_errno
    if result.oom:
        payload["oom"] = True
    if output.stdout.seen:
        payload["stdout"] = "sha256:" + output.stdout.digest()
    if output.stderr.seen:
        payload["stderr"] = "sha256:" + output.stderr.digest()
    if not (output.stdout.whole and output.stderr.whole):
        payload["gap"] = (
            True  # part of the output was no longer kept when a later engine took over: digests cover the rest
        )
    if stdin:
        payload["stdin"] = stdin
    return Draft(chain=sandbox, act=EXEC, phase=Phase.RESULT, ref=result.id, payload=payload)


def exec_failure(sandbox: SandboxId, exec_id: ExecId, error: DsecError) -> Draft:
    """A command without an outcome of its own."""
    return Draft(chain=sandbox, act=EXEC, phase=Phase.RESULT, ref=exec_id, payload=failure(error))


def decision(given: Mapping[str, Json]) -> dict[str, Json]:
    """What somebody decided, checked.  Raises: BadRequest, TooLarge."""
    value: object = given
    if not isinstance(value, Mapping) or not value:
        raise BadRequest(
            f"decision: {shown(given)} is not an object of JSON with something in it", field="decision"
        )
    payload = _json("decision", given, 0)
    assert isinstance(payload, dict)
    size = len(json.dumps(payload, separators=(",", ":")))
    if size > MAX_DECISION:
        raise TooLarge(
            f"decision: {size} bytes of JSON, at most {MAX_DECISION} are kept",
            hint="keep what is large in a file of the sandbox, and name it with its digest",
            size=size,
            limit=MAX_DECISION,
        )
    return payload


def _json(field: str, value: object, depth: int) -> Json:
    """Raises: BadRequest: nothing that JSON can say everywhere alike."""
    if depth > MAX_DEPTH:
        raise BadRequest(f"{field}: nested deeper than {MAX_DEPTH}", field=field)
    match value:
        case None | bool():
            return value
        case int() if -_WHOLE <= value < _WHOLE:
            return value
        case float() if math.isfinite(value):
            return value
        case str() if value.isascii() or _encodable(value):
            return value
        case Mapping() if all(isinstance(name, str) and _encodable(name) for name in value):
            return {name: _json(field, item, depth + 1) for name, item in value.items()}
        case list() | tuple():
            return [_json(field, item, depth + 1) for item in value]
    raise BadRequest(f"{field}: {shown(value)} cannot be kept as JSON", field=field)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
