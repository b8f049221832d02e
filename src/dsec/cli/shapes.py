"""What ``--json`` prints: the keys of every document and what they mean. Keys are added, never renamed or removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of document. ``form``: how it is arranged; ``keys``: of each object, and what they mean."""

    form: str
    keys: dict[str, str]


RESULT: Final = {
    "id": "exec id",
    "exit_code": "of the command; 128 + signal when one ended it",
    "signal": "that ended it, or 0",
    "timed_out": "its time was up",
    "oom": "a process was killed for memory",
    "duration": "seconds",
    "stdout": "`{data, encoding}`; encoding is `utf-8`, or `base64` where it is not text",
    "stderr": "the same",
    "truncated": "more was written than is kept",
    "dropped": "bytes that were not kept",
}
SANDBOX: Final = {
    "id": "sandbox id",
    "state": "`pending` `running` `paused` `hibernated` `cold` `stopping` `gone` `failed` `lost`",
    "level": "`container` or `process`",
    "base": "image it stands on: `system` is that of the template `base`",
    "template": "the built template it began as, or empty",
    "flags": "what its level guarantees here",
    "created_at": "seconds since the epoch (without `--json` times are ISO 8601, UTC)",
    "expires_at": "the same, 0 = never",
    "ended_at": "the same, 0 = not yet",
    "reason": "why it ended, or is in this state, or empty",
    "residence": "whether it stays running, and why; empty in lists, and where nothing decides that",
    "session_id": "SESSION_ID inside",
    "workdir": "where commands run",
    "limits": "`cpu_millis`, `memory_mib`, `pids`, `disk_mib`, `open_files`, `output_bytes`",
    "idle": "seconds without use until it ends, 0 = never",
    "hibernate": "`auto`, `files` or `never`: whether it may be reduced to its files when nobody uses it",
    "read_only": "root file system",
    "project": "whose volumes its names mean",
    "volumes": "list of `{source, target, read_only}`; source is the name of a volume, or a path of the machine",
    "env": "variables of every command",
    "labels": "yours",
}
BUILT: Final = {
    "name": "of the template",
    "digest": "of the blueprint and all that it was built of",
    "blueprint": "digest of the template alone",
    "base": "image that was used",
    "base_digest": "of its tree",
    "layers": "digests over the base, topmost first",
    "lock": "digest of the lock of its dependencies, or empty",
    "packages": "list of `name==version`: what the lock holds",
    "origin": "snapshot that it was made of, or empty",
    "built_at": "seconds since the epoch",
    "floating": "list of `{field, line, text, why}`: dependencies that are not pinned",
    "unenforced": "the same: what is declared and not enforced",
    "template": "every field, written out",
}
TAGGED: Final = {
    "name": "of the template",
    "tag": "that means it",
    "digest": "of the built template",
    "at": "when the tag was set, seconds since the epoch",
}
SNAPSHOT: Final = {
    "id": "snapshot id",
    "sandbox": "whose files it holds",
    "kind": "`files`",
    "level": "of that sandbox",
    "base": "the same",
    "created_at": "seconds since the epoch",
    "paused": "seconds for which the sandbox stood still",
}
VOLUME: Final = {
    "id": "of these files",
    "project": "to which it belongs",
    "name": "unique in its project",
    "size_mib": "what it may hold",
    "used_bytes": "what it holds, -1 = unknown",
    "created_at": "seconds since the epoch",
    "writer": "sandbox that may write to it now, or empty",
    "readers": "sandboxes that see it read-only now",
}
METRICS: Final = {
    "metrics": "null when it does not run, or another command has the engine; else `cpu_seconds`, `memory_bytes`, "
    "`memory_peak_bytes`, `disk_bytes`, `pids`, `oom_kills`, each -1 where the level cannot tell"
}
EXEC: Final = {
    "id": "exec id",
    "sandbox": "its sandbox",
    "pid": "inside the sandbox, 0 = unknown",
    "argv": "program and arguments",
    "started_at": "seconds since the epoch",
    "running": "it has not ended",
    "exit_code": "null while it runs",
    "signal": "the same",
    "cause": "`itself`, `timeout` or `killed`; null while it runs",
}
RECORD: Final = {
    "chain": "sandbox id, or `engine`",
    "seq": "number within its chain, from 1",
    "at": "seconds since the epoch (without `--json` ISO 8601, UTC)",
    "act": "such as `exec`",
    "phase": "`intent`, `result` or `note`",
    "ref": "ties a result to its intent",
    "actor": "who acted",
    "payload": "facts",
    "digest": "chains over the record before",
}
PROBLEM: Final = {
    "sandbox": 'whose, "" = nobody\'s',
    "what": "is left",
    "since": "seconds since the epoch",
    "attempts": "so far",
    "error": "of the last one",
    "kind": "cleanup or alert",
    "next_try": "seconds since the epoch, 0 = not known",
    "hint": "what to do",
}
POOL: Final = {
    "most": "ready sandboxes that it may keep, 0 = none",
    "memory_most": "bytes that they may take together",
    "ready": "now",
    "target": "how many shall be",
    "memory_bytes": "that the ready ones take",
    "hits": "creates that found one ready",
    "misses": "creates that did not",
    "wasted": "made and never used",
    "short": "the machine is short of memory, and nothing is made ahead",
    "kinds": "list of `{level, base, template, limits, read_only, hits, misses, wasted, ready, target, rate, make_seconds, memory_bytes}`",
}
TRANSFER: Final = {
    "entries": "files, directories and links that were copied",
    "bytes": "of content",
    "skipped": "list of `[path, reason]`, at most 1,000",
    "skipped_count": "all that were left out",
}
EXPORTED: Final = {"exported": "snapshot id, or name of the template", "file": "that was written"}
DONE: Final = {"id": "sandbox or snapshot id", "error": "null, or `{code, message}`"}
LEFT: Final = {"id": "exec id", "sandbox": "sandbox id", "pid": "inside"}
REPORT: Final = {
    "kernel": "version",
    "layers": "list of `{name, status, detail, hint}`; status is `active`, `degraded` or `unavailable`",
    "levels": "list of `{level, available, reason, hint, flags, missing, seconds}`",
}
IMAGE: Final = {
    "digest": "of its tree",
    "names": "that stand for it now",
    "sources": "digests by which others know it",
    "size": "bytes of its file",
    "mutable": "it shows files of this machine, which change",
    "created_at": "seconds since the epoch",
    "used_at": "when it was last asked for",
    "held_by": "templates and engines that need it",
}
FREED: Final = {"paths": "that are gone", "bytes": "of images that were"}
COLLECTED: Final = {"removed": "paths", "problems": "as `ps --problems`"}
MEASURED: Final = {
    "level": "that was measured",
    "pool": "ready sandboxes that were kept",
    "machine": "`kernel`, `cpus`",
    "results": "list of `{what, count, p50_ms, p90_ms, p99_ms, max_ms}`",
    "claims": "`{hits, misses, wasted}`: creates that found a sandbox ready, that did not; ready ones never used",
}
FINDINGS: Final = {"sound": "nothing is wrong", "findings": "list of `{chain, seq, problem}`"}

KEY: Final = {
    "id": "what the key is called by: `ky-...`, and never the key",
    "scope": "`admin` or `developer`",
    "project": "within which it is good",
    "label": "its maker's words",
    "created_at": "seconds since the epoch",
    "used_at": "the same, to the minute, 0 = never",
    "expires_at": "the same, 0 = never",
    "revoked_at": "the same, 0 = it was not",
}
PROJECT: Final = {
    "name": "of the project",
    "quota": "`sandboxes`, `dormant`, `cpu_millis`, `memory_mib`, `disk_mib`, `journal_mib`, `rate`, `share`; 0 = no bound",
    "created_at": "seconds since the epoch",
}
SHAPES: Final[dict[str, tuple[Shape, ...]]] = {
    "run": (Shape("an object", RESULT),),
    "create": (Shape("an object", SANDBOX),),
    "ls": (Shape("a list of objects", SANDBOX),),
    "exec": (Shape("an object", RESULT), Shape("with `--detach` an object", LEFT)),
    "cp": (Shape("an object", TRANSFER),),
    "pause": (Shape("a list of objects", DONE),),
    "resume": (Shape("a list of objects", DONE),),
    "hibernate": (Shape("a list of objects", DONE),),
    "snapshot": (Shape("an object", SNAPSHOT),),
    "snapshots": (Shape("a list of objects", SNAPSHOT),),
    "snapshot-export": (Shape("an object", EXPORTED),),
    "snapshot-import": (Shape("an object", SNAPSHOT),),
    "fork": (Shape("a list of objects", SANDBOX),),
    "rollback": (Shape("an object", SANDBOX),),
    "rm": (Shape("a list of objects", DONE),),
    "template build": (Shape("an object", BUILT),),
    "template export": (Shape("an object", EXPORTED),),
    "template promote": (Shape("an object", BUILT),),
    "template import": (Shape("an object", BUILT),),
    "template ls": (Shape("a list of objects", TAGGED),),
    "template history": (Shape("a list of objects", TAGGED),),
    "template show": (Shape("an object", BUILT),),
    "template check": (
        Shape(
            "a list of objects",
            {"what": "differs", "first": "as the first run saw it", "second": "as the second did"},
        ),
    ),
    "template tag": (Shape("an object", BUILT),),
    "template rollback": (Shape("an object", BUILT),),
    "key create": (Shape("an object", {"key": "the key itself, shown this once", **KEY}),),
    "key token": (Shape("an object", {"key": "the key itself, shown this once", **KEY}),),
    "key ls": (Shape("a list of objects", KEY),),
    "project ls": (Shape("a list of objects", PROJECT),),
    "project show": (Shape("an object", PROJECT),),
    "project set": (Shape("an object", PROJECT),),
    "volume create": (Shape("an object", VOLUME),),
    "volume ls": (Shape("a list of objects", VOLUME),),
    "volume inspect": (Shape("an object", VOLUME),),
    "inspect": (Shape("an object", {**SANDBOX, **METRICS}),),
    "events": (Shape("an object a line", RECORD),),
    "ps": (
        Shape("a list of objects", EXEC),
        Shape("with `--problems` a list of objects", PROBLEM),
        Shape("with `--pool` an object", POOL),
    ),
    "doctor": (Shape("an object", REPORT),),
    "image ls": (Shape("a list of objects", IMAGE),),
    "image get": (Shape("an object", IMAGE),),
    "image refresh": (Shape("an object", IMAGE),),
    "image verify": (Shape("a list of objects", IMAGE),),
    "image rm": (Shape("a list of objects", IMAGE),),
    "image gc": (Shape("an object", FREED),),
    "gc": (Shape("an object", COLLECTED),),
    "bench": (Shape("an object", MEASURED),),
    "audit verify": (Shape("an object", FINDINGS),),
    "audit log": (Shape("an object a line", RECORD),),
}
"""By command."""
