"""Rewrites for the time of an export: what cannot be traced as it is, changed reversibly and reported."""

from exportkit.patching.chunks import chunk_size_of
from exportkit.patching.lists import ListingNoted
from exportkit.patching.rules import FEATURE_ROWS, LISTS_OF_ONE, RULES, Rule, adapted_call, applied, matching_rules

__all__ = [
    "FEATURE_ROWS",
    "LISTS_OF_ONE",
    "RULES",
    "ListingNoted",
    "Rule",
    "adapted_call",
    "applied",
    "chunk_size_of",
    "matching_rules",
]
