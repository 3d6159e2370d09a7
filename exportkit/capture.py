"""The module ``exportkit.capture``, which is also the function: ``with exportkit.capture(model, specs) as found``."""

from exportkit._callable_module import make_callable
from exportkit.module_outputs.context import Captured, capture
from exportkit.module_outputs.decorate import capture_outputs, merge_with_config_defaults
from exportkit.module_outputs.record import OutputRecorder

__all__ = ["Captured", "OutputRecorder", "capture", "capture_outputs", "merge_with_config_defaults"]

make_callable(__name__, capture)
