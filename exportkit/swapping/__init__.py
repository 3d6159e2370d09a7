"""Replaces classes of a model by classes of the user."""
