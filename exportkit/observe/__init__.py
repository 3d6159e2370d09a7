"""Stage 1, record: calls of a model as they were seen."""

from exportkit.observe.observation import Call, Failure, Observation
from exportkit.observe.observer import InputObserver
from exportkit.observe.parts import Edge, Part
from exportkit.observe.seen import SeenShapes
from exportkit.observe.signature import Signature

__all__ = ["Call", "Edge", "Failure", "InputObserver", "Observation", "Part", "SeenShapes", "Signature"]
