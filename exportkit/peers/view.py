"""``observer.info``: the recorded calls under the names that users of ``torch.onnx.InputObserver`` know."""

from __future__ import annotations

import torch

from exportkit.calls.call import Call
from exportkit.calls.observation import Observation
from exportkit.trees import string_type


class ObservedInput:
    """One recorded call: ``flat_list`` holds its own tensors, ``aligned_flat_list`` has None where it lacks one."""

    def __init__(self, call: Call, paths: tuple[str, ...]) -> None:
        self._call, self._paths = call, paths

    @property
    def flat_list(self) -> list[torch.Tensor]:
        """The tensors of this call, in signature order."""
        return list(self._call.tensors().values())

    @property
    def aligned_flat_list(self) -> list[torch.Tensor | None]:
        """The tensors that any call had, None where this one lacks it."""
        tensors = self._call.tensors()
        return [tensors.get(path) for path in self._paths]

    @property
    def n_aligned_tensors(self) -> int:
        """How many tensors any call had."""
        return len(self._paths)

    def __len__(self) -> int:
        return len(self.flat_list)

    def str_obs(self) -> str:
        """Returns the inputs of the call in one line, constants included."""
        return f"call {self._call.index}: {string_type(self._call.values(), with_shape=True)}"


class ObservedInfo:
    """All recorded calls, in order."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    def __len__(self) -> int:
        return len(self._observation.calls)

    @property
    def inputs(self) -> list[ObservedInput]:
        """The inputs of each call."""
        paths = tuple(self._observation.tensor_paths())
        return [ObservedInput(call, paths) for call in self._observation.calls]

    @property
    def flat_outputs(self) -> list[list[torch.Tensor | None]]:
        """The output tensors of each call, None included."""
        kept = (torch.Tensor, type(None))
        return [[leaf for leaf in call.outputs.leaves if isinstance(leaf, kept)] for call in self._observation.calls]

    @property
    def latencies(self) -> list[float]:
        """Durations of the calls in seconds."""
        return [call.latency for call in self._observation.calls]

    @property
    def signature_names(self) -> list[str]:
        """Names of the method's parameters."""
        return list(self._observation.signature.names)
