"""One script for each claim of speed; ``python -m benchmarks.NAME`` from the root of the repository.

Each prints a table and, as its last line, JSON; ``--json FILE`` keeps it, and ``python -m benchmarks.report`` makes
``docs/reference/benchmarks.md`` of what was kept. The bars are data, in ``bars.py``.
"""
