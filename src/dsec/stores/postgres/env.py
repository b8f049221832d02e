"""What Alembic runs: the migrations, over the connection and within the transaction of whoever called it."""

from __future__ import annotations

from alembic import context

from dsec.stores.postgres.tables import VERSIONS

context.configure(
    connection=context.config.attributes["connection"], version_table=VERSIONS, transactional_ddl=True
)
context.run_migrations()
