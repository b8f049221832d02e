"""Back-ends that reach into sandboxes: the client of the init protocol and what is built on it."""
