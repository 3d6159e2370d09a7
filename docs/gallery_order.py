"""The order of the examples in the gallery."""

# In the order in which a new user needs them; all others follow by name.
_FIRST = (
    "first_export",
    "unrecorded_batch",
    "nested_inputs",
    "language_model",
    "own_cache",
    "module_state",
    "early_exit",
    "encoder_decoder",
    "multimodal",
    "pipeline",
    "diffusers",
    "sentence_transformer",
    "script",
    "genai",
    "int4",
    "save_observation",
    "from_torch_observer",
    "hidden_states",
    "swap_class",
)


def place(filename: str) -> tuple[int, str]:
    """Returns the key that examples are sorted by."""
    name = filename.removeprefix("plot_").removesuffix(".py")
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST)), name
