"""``python -m dsec``: the command line, as ``dsec`` is."""

from __future__ import annotations

from dsec.cli.main import main

if __name__ == "__main__":
    main()
