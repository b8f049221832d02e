"""Interfaces between the engine and its back-ends. Their docstrings are the contract; `dsec.testing` holds the suites."""
