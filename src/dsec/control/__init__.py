"""What an engine offers above single sandboxes: templates, built once and run many times."""
