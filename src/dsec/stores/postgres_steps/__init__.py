"""How the tables of a journal in PostgreSQL came to be: a migration each, which Alembic finds here."""
