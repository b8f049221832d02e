"""Many rounds in which a server is killed while many ask it for everything at once, and a judge afterwards that believes nobody but the kernel."""
