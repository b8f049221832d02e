"""DSec: the execution environment that agents run in."""
