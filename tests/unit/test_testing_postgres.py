"""The PostgreSQL that tests use."""

from __future__ import annotations

import asyncio

from dsec.testing.postgres import execute


def test_a_test_has_an_empty_database_of_a_real_server(postgres_url: str) -> None:
    rows = asyncio.run(execute(postgres_url, "SELECT current_setting('server_version_num')::int AS v"))
    assert rows[0]["v"] >= 150_000
    assert asyncio.run(execute(postgres_url, "SELECT 1 FROM pg_tables WHERE schemaname = 'public'")) == []
    asyncio.run(execute(postgres_url, "CREATE TABLE kept (a int)"))


def test_what_one_test_leaves_another_does_not_find(postgres_url: str) -> None:
    assert asyncio.run(execute(postgres_url, "SELECT 1 FROM pg_tables WHERE schemaname = 'public'")) == []
