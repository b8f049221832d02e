"""Adaptors that let other frameworks use DSec. Each needs its framework installed, and uses only the public SDK."""
