"""Stage 3, build: sizes, tensors and dynamic shapes from a plan, and the runs of the model that confirm it."""

from exportkit.arguments.audit import one_size
from exportkit.arguments.build import Arguments, build_arguments, recorded_call, with_integers_below
from exportkit.arguments.compare import close, outputs_close, tolerances
from exportkit.arguments.eager import replaced_buffer, replayed, run_eager
from exportkit.arguments.echoes import value_at
from exportkit.arguments.missing import (
    Fills,
    completed_call,
    dependent_outputs,
    fill_missing,
    find_fills,
    run_leniently,
    size_in,
    solve_sizes,
)
from exportkit.arguments.planning import plan_calls
from exportkit.arguments.recorded import exportable_arguments, recorded_arguments, recorded_dynamic_shapes
from exportkit.arguments.shapes import nested_spec
from exportkit.arguments.simplify import (
    as_simplified,
    lists_of_many,
    rows_of_members,
    with_joined_lists,
    with_split_lists,
)
from exportkit.arguments.sizes import UnseenSizes, choose_sizes, unseen_sizes
from exportkit.arguments.table import call_table

__all__ = [
    "Arguments",
    "Fills",
    "UnseenSizes",
    "as_simplified",
    "build_arguments",
    "call_table",
    "choose_sizes",
    "close",
    "completed_call",
    "dependent_outputs",
    "exportable_arguments",
    "fill_missing",
    "find_fills",
    "lists_of_many",
    "nested_spec",
    "one_size",
    "outputs_close",
    "plan_calls",
    "recorded_arguments",
    "recorded_call",
    "recorded_dynamic_shapes",
    "replaced_buffer",
    "replayed",
    "rows_of_members",
    "run_eager",
    "run_leniently",
    "size_in",
    "solve_sizes",
    "tolerances",
    "unseen_sizes",
    "with_integers_below",
    "value_at",
    "with_joined_lists",
    "with_split_lists",
]
