"""The engine: this machine's sandboxes, from create to destroyed, written against the ports."""
