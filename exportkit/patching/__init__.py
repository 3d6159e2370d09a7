"""Rewrites: those an export needs, and replacements of classes that users register. All are reversible and reported."""

from exportkit.patching.check import PatchCheck, check_patch
from exportkit.patching.chunks import chunk_size_of
from exportkit.patching.library_patches import library_translations
from exportkit.patching.lists import ListingNoted
from exportkit.patching.mapping import (
    clear_patch_mapping,
    get_patch_mapping,
    register_patch_mapping,
    unregister_patch_mapping,
)
from exportkit.patching.recorders import patch_output_recorders
from exportkit.patching.rules import (
    ALL_BUT_NONE,
    ALL_EXPERTS,
    BUILT_IN,
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
from exportkit.patching.swap import AppliedPatches, Swap, apply_patches, swaps_in_force

__all__ = [
    "AppliedPatches",
    "BUILT_IN",
    "ALL_BUT_NONE",
    "ALL_EXPERTS",
    "FEATURE_ROWS",
    "LIBRARY_PATCHES",
    "LISTS_OF_ONE",
    "ListingNoted",
    "PatchCheck",
    "RULES",
    "Rule",
    "STRICT",
    "SYMBOLIC_LENGTHS",
    "Swap",
    "adapted_call",
    "applied",
    "apply_patches",
    "check_patch",
    "chunk_size_of",
    "clear_patch_mapping",
    "get_patch_mapping",
    "library_translations",
    "matching_rules",
    "patch_output_recorders",
    "register_patch_mapping",
    "swaps_in_force",
    "unregister_patch_mapping",
]
