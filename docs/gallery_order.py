"""The order of the gallery: in comes the name of an example, out comes its place."""

# What a new user asks first comes first; what is not named here comes last, by name.
_FIRST = (
    "first_export",
    "unrecorded_batch",
    "nested_inputs",
    "language_model",
    "encoder_decoder",
    "multimodal",
    "genai",
    "save_observation",
    "from_torch_observer",
    "hidden_states",
    "swap_class",
)


def place(filename: str) -> tuple[int, str]:
    """Returns what examples are sorted by."""
    name = filename.removeprefix("plot_").removesuffix(".py")
    return (_FIRST.index(name) if name in _FIRST else len(_FIRST)), name
