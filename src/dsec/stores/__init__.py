"""Back-ends that keep things on disk: the journal, writable layers."""
