"""Rewrites of modules and functions that are in force while a model is traced, keyed by structure."""
