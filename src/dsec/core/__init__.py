"""Deciding without doing: plain functions of data."""
