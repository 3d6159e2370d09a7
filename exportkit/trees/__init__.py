"""Nested values ⇄ leaves with paths, and reversible registration of caches with torch's pytree and optree."""

from exportkit.trees.flatten import Tree, check_opened, flatten, join, with_list
from exportkit.trees.make import make_dynamic_cache, make_encoder_decoder_cache, make_static_cache
from exportkit.trees.objects import Growth, is_cache_class, set_stored_length
from exportkit.trees.registry import register_flattening_functions, registered_caches
from exportkit.trees.text import string_type

__all__ = [
    "Growth",
    "Tree",
    "check_opened",
    "flatten",
    "is_cache_class",
    "join",
    "make_dynamic_cache",
    "make_encoder_decoder_cache",
    "make_static_cache",
    "register_flattening_functions",
    "registered_caches",
    "set_stored_length",
    "string_type",
    "with_list",
]
