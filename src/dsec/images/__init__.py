"""Read-only images: how the base is built, how trees are named by content, where images are kept."""
