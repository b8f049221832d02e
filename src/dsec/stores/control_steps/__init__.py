"""How the control database came to be what it is: migrations, each after the one that it names. Alembic loads all files here."""
