"""Python packages of a template as one read-only layer: which ones (a lock), and their tree, the same everywhere."""
