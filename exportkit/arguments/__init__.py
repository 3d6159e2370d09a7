"""Builds calls from a plan at chosen sizes, and tabulates recorded ones for the plan."""
