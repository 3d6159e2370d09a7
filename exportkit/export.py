"""The module ``exportkit.export``, which is also the function: ``exportkit.export(model, observer)``."""

from exportkit._callable_module import make_callable
from exportkit.api.export import export

__all__ = ["export"]

make_callable(__name__, export)
