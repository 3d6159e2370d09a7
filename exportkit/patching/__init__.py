"""Rewrites for the time of an export: what cannot be traced as it is, changed reversibly and reported."""

from exportkit.patching.chunks import chunk_size_of
from exportkit.patching.library_patches import library_translations
from exportkit.patching.lists import ListingNoted
from exportkit.patching.rules import (
    FEATURE_ROWS,
    LIBRARY_PATCHES,
    LISTS_OF_ONE,
    RULES,
    STRICT,
    SYMBOLIC_LENGTHS,
    Rule,
    adapted_call,
    applied,
    matching_rules,
)

__all__ = [
    "FEATURE_ROWS",
    "LIBRARY_PATCHES",
    "LISTS_OF_ONE",
    "RULES",
    "STRICT",
    "SYMBOLIC_LENGTHS",
    "ListingNoted",
    "Rule",
    "adapted_call",
    "applied",
    "chunk_size_of",
    "library_translations",
    "matching_rules",
]
