"""The table of all cases: importing this module reads the files that define them."""

import importlib

FILES = (
    "size_conditions",
    "value_decisions",
    "small_sizes",
    "computed_sizes",
    "returned_values",
    "constants",
    "optional_inputs",
    "layers",
    "state_and_effects",
    "carried_objects",
    "traits",
    "numbers",
    "python_numbers",
    "operators",
    "empty_selections",
    "single_selections",
    "well_behaved",
    "transformers_models",
)

for name in FILES:
    importlib.import_module(f"tests.trust.{name}")
