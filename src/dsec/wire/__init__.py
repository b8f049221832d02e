"""Shapes on the wire: frames of the init protocol, requests to the spawner, errors."""
