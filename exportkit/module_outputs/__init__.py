"""Captures what modules inside a model return."""
