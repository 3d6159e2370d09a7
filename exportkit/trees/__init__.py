"""Nested values ⇄ leaves with paths, and reversible registration of caches with torch's pytree and optree."""

from exportkit.trees.caches import (
    COUNTER,
    Growth,
    is_cache_class,
    make_dynamic_cache,
    make_encoder_decoder_cache,
    make_static_cache,
    set_stored_length,
    stored_length,
    unfilled_layers,
)
from exportkit.trees.constants import check_opened, check_unchanged, constants_in, note_values, text_of, with_changed
from exportkit.trees.fingerprint import Fingerprint, fingerprint
from exportkit.trees.flatten import flatten, with_list
from exportkit.trees.registry import caches_opened, opens_in_order, register_flattening_functions, registered_caches
from exportkit.trees.structure import first_name, join, joined
from exportkit.trees.tree import Tree, cloned, string_type

__all__ = [
    "COUNTER",
    "Fingerprint",
    "Growth",
    "Tree",
    "caches_opened",
    "check_opened",
    "check_unchanged",
    "cloned",
    "constants_in",
    "fingerprint",
    "first_name",
    "flatten",
    "is_cache_class",
    "join",
    "joined",
    "make_dynamic_cache",
    "make_encoder_decoder_cache",
    "make_static_cache",
    "note_values",
    "opens_in_order",
    "register_flattening_functions",
    "registered_caches",
    "set_stored_length",
    "stored_length",
    "string_type",
    "text_of",
    "unfilled_layers",
    "with_changed",
    "with_list",
]
