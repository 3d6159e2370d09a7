"""Traces a model into exported programs, with strategies, audit and explained failures."""
