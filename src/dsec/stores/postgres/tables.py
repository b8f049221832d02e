"""The tables as they are now, by their columns. How they came to be is in `postgres_steps`."""

from __future__ import annotations

from typing import Final

HEAD: Final = "0002"
"""The newest migration."""
VERSIONS: Final = "journal_version"
"""Where the database itself says which migration was the last."""
SCHEMA: Final = "dsec"
"""In which all of them are; others of ours live there, too."""

TABLES: Final = {
    "chain": (
        "number name state ended expires reason created session workdir boot boot_at flags class project spec_number"
    ),
    "record": "chain seq position at act phase ref actor payload payload_digest digest",
    "spec": "number digest text",
    "snapshot": "id sandbox kind spec created paused project",
    "volume": "id project name size created",
    "mark": "name number digest",
}
INDEXES: Final = frozenset(
    {
        *("chain_pkey", "chain_name_key", "chain_class", "chain_project", "chain_spec", "chain_expires"),
        *("record_pkey", "record_position", "spec_pkey", "spec_digest_key"),
        *(
            "snapshot_pkey",
            "snapshot_project",
            "snapshot_sandbox",
            "volume_pkey",
            "volume_project_name_key",
            "mark_pkey",
        ),
    }
)
"""Whose absence nothing would tell but slowness, and what should be there once being there twice."""
