"""How the control database came to be what it is, step by step."""
