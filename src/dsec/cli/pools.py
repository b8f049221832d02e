"""The pool of ready sandboxes, as it is shown."""

from __future__ import annotations

from dsec.cli.output import put, put_json, put_table
from dsec.model.pool import PoolInfo, PoolKind
from dsec.model.sandbox import MIB


def show_pool(found: PoolInfo, as_json: bool) -> None:
    """All of it as JSON, or a line for each kind and one for all together."""
    if as_json:
        put_json(found)
    elif not found.most:
        put("this engine keeps no sandboxes ready\n")
    else:
        rows = [_row(kind) for kind in found.kinds]
        whole = (
            f"all (at most {found.most})",
            found.ready,
            found.target,
            found.hits,
            found.misses,
            found.wasted,
        )
        rows.append(
            (*map(str, whole), "", f"{found.memory_bytes / MIB:.1f} of {found.memory_most / MIB:.0f}")
        )
        put_table(("KIND", "READY", "TARGET", "HITS", "MISSES", "WASTED", "PER SECOND", "MIB"), rows)


def _row(kind: PoolKind) -> tuple[str, ...]:
    what = f"{kind.level} {kind.template or kind.base} {kind.limits.memory_mib} MiB"
    numbers = (kind.ready, kind.target, kind.hits, kind.misses, kind.wasted)
    return (what, *map(str, numbers), f"{kind.rate:.2f}", f"{kind.ready * kind.memory_bytes / MIB:.1f}")
