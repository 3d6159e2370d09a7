"""StatefulOnnxModel: the graph of a model that keeps its state on its modules, called like that model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from exportkit.onnx_files.onnx_model import OnnxModel
from exportkit.plan.sizes import solve_sizes
from exportkit.programs.module_state import RESULT, STATE
from exportkit.trees import Tree, flatten, join

if TYPE_CHECKING:
    from exportkit.folder.saved import Saved
    from exportkit.onnx_files.translate import OnnxFile
    from exportkit.programs.exported import Exported
    from exportkit.proof.report import Report


class StatefulOnnxModel(OnnxModel):
    """An ONNX graph that remembers its state from call to call, as the model does.

    A call with an empty cache starts anew, and so does one with another batch than the call before.

    Attributes:
        module_state: The state that the last call left, or None before the first one.
    """

    module_state: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns, computed by onnxruntime; ``module_state=`` takes another state to go on from.

        Raises:
            ArgumentError: if the arguments do not fit the graph.
            RuntimeFailure: if onnxruntime refuses them.
        """
        if STATE not in kwargs and self._goes_on(args, kwargs):
            kwargs[STATE] = self.module_state
        returned = super().__call__(*args, **kwargs)
        self.module_state = returned[STATE]
        return returned[RESULT]

    def verify(self, unseen: bool = True) -> Report:
        """Returns the proof, with the state as an input and an output.

        Args:
            unseen: Also try sizes that were not recorded; the model runs them in eager mode as the truth.
        """
        return self.stateless().verify(unseen)

    def stateless(self) -> OnnxModel:
        """Returns the graph without a memory: the state is an argument, and in what it returns."""
        return OnnxModel(self.file, self.exported, self.parts)

    def _goes_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.module_state is None:
            return False
        exported = self.exported
        plan, past = exported.plan, exported.plan.with_role("past")
        given = exported.observation.signature.bind(args, kwargs)
        sizes = self._sizes({name: flatten(value) for name, value in given.items()})
        batch = plan.with_role("batch")
        state = self._sizes({STATE: flatten(self.module_state)})
        return (past is None or sizes[past.name] > 0) and (batch is None or sizes[batch.name] == state[batch.name])

    def _sizes(self, trees: dict[str, Tree]) -> dict[str, int]:
        shapes = {
            join(name, path): tuple(t.shape) for name, tree in trees.items() for path, t in tree.tensors().items()
        }
        return solve_sizes(self.exported.plan, shapes)


def onnx_model_of(
    file: OnnxFile, exported: Exported | Saved, parts: Mapping[str, OnnxModel] | None = None
) -> OnnxModel:
    """Returns the graph as something that is called like the model, with a memory if the model has one.

    Args:
        file: The ONNX file.
        exported: The export that it comes from, or what was saved of it.
        parts: The graphs of what feeds the model.
    """
    return (StatefulOnnxModel if exported.stateful else OnnxModel)(file, exported, parts)
