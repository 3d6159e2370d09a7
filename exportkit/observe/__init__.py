"""Stage 1, record: calls of a model as they were seen."""

from exportkit.observe.observation import Call, Failure, Observation
from exportkit.observe.observer import InputObserver
from exportkit.observe.seen import SeenShapes
from exportkit.observe.signature import Signature

__all__ = ["Call", "Failure", "InputObserver", "Observation", "SeenShapes", "Signature"]
