"""The journal and the table of sandboxes in a database of PostgreSQL."""
