"""What Alembic runs: the migrations, over the connection and within the transaction of whoever called it."""

from __future__ import annotations

from alembic import context

from dsec.stores.control.tables import VERSIONS, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSIONS,
    transactional_ddl=True,  # SQLite's is, too, when a transaction is begun by hand
)
context.run_migrations()
