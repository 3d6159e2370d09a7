"""Locates the module where an exported graph begins to differ from the model."""
