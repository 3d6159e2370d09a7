"""Runs ONNX models: the only place that opens onnxruntime sessions, and moves tensors between them and torch.

`GraphSession` is what runtimes have in common; `exportkit.running.openvino` has a second one.

On the CPU, tensors go in and out as numpy arrays, which share their memory and are the fastest way there. On other
devices, and for bfloat16, which numpy lacks, tensors are bound where they are, and outputs come back by DLPack.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exportkit.calls.call import shapes_text
from exportkit.errors import InvalidRequestError, InvalidTypeError, MissingPackageError, RuntimeFailure, first_line
from exportkit.running.kernels import late_nodes, opened_with_float32, without_cpu_branches, without_weights
from exportkit.running.placement import CPU, Placement, require_onnxruntime
from exportkit.running.protos import all_nodes
from exportkit.trees.tree import ONNX_DTYPES, dtype_name

if TYPE_CHECKING:
    import onnxruntime

FUSED_OPSET = 23  # the first one that has attention, norms and rotary embeddings as operators
# What both torch and onnxruntime compute with.
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16,
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
)  # fmt: skip
# What ends the whole process, by SIGABRT or SIGFPE, instead of raising. Seen in onnxruntime 1.31.1.
_NOT_FOR_EMPTY = {"GRU", "LSTM"}  # if the batch is 0; GRU also if the length is
_FUSION_NOT_FOR_EMPTY = "MatmulTransposeFusion"  # with a Transpose that moves axis 0 to the last two, if its size is 0
_BFLOAT16, _BOOL = "tensor(bfloat16)", "tensor(bool)"
REFUSED_INDEX = 2**31 - 1  # what a graph looks up, in vain, where a condition about values does not hold
# Threads of onnxruntime that wait actively for the next call keep torch, which computes in between, from the cores: a
# proof takes up to twice as long.
_IDLE = "session.force_spinning_stop"
_REFUSES = (
    "the model raises for these values, or takes a branch that was not traced; call the model itself to see which."
)
_FAILED_CHECK = "an index is out of range, or a check on values failed"
_FOLDER = "session.model_external_initializers_file_folder_path"
_ASSIGNMENT = "session.record_ep_graph_assignment_info"
_SHOWN = 8  # operators that run on the CPU beside another device


@functools.cache
def require_fused_operators() -> None:
    """Returns if the installed onnxruntime has the operators of opset 23 that graphs are fused to.

    Raises:
        MissingPackageError: if it is not installed, or too old.
    """
    import onnx.parser

    runtime = require_onnxruntime()
    text = f"""<ir_version: 11, opset_import: ["" : {FUSED_OPSET}]>
        check (float[1, 2, 1, 4] q, float[1, 1, 1, 4] new, float[1, 1, 3, 4] past, float[1, 1, 2] angles,
               float[4] scale, bool[1, 1, 1, 4] mask)
        => (float[1, 2, 1, 4] y, float[1, 1, 4, 4] keys, float[1, 1, 4, 4] values) {{
            normal = RMSNormalization <axis = -1> (q, scale)
            turned = RotaryEmbedding <num_heads = 2> (normal, angles, angles)
            y, keys, values = Attention (turned, new, new, mask, past, past)
        }}"""
    try:
        Session(onnx.parser.parse_model(text).SerializeToString())
    except RuntimeFailure as error:
        raise MissingPackageError(
            "The installed onnxruntime does not have the operators that graphs are fused to.",
            expected=f"Attention, RMSNormalization and RotaryEmbedding of opset {FUSED_OPSET} on the CPU",
            got=f"onnxruntime {runtime.__version__}",
            hint="update onnxruntime, or export without a runtime: such a graph uses only standard ONNX operators.",
        ) from error


class GraphSession:
    """One ONNX model in a runtime.

    Args:
        path: The file.

    Attributes:
        inputs: Names of the graph's inputs.
        shapes: Shape of each input by name, with the names of dynamic axes.
        outputs: Names of the graph's outputs.
        in_float32: Names of operators that compute in float32 instead of the dtype of the model.
    """

    runtime = ""  # its name in messages
    inputs: list[str]
    shapes: dict[str, tuple[str | int, ...]]
    outputs: list[str]
    in_float32: tuple[str, ...] = ()

    def __init__(self, path: Path, **settings: Any) -> None:
        raise NotImplementedError

    @property
    def finding(self) -> str:
        """What a proof should mention about the way this runtime computes, or nothing."""
        return ""

    def run(self, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the outputs by name, in order.

        Args:
            feeds: Tensors by name of the graph's input; names that the graph does not have are ignored.

        Raises:
            InvalidRequestError: if an input is missing.
            InvalidTypeError: if the runtime has no counterpart of a dtype, or a tensor has no values or is sparse.
            RuntimeFailure: if the runtime refuses the call.
        """
        given = dict[str, torch.Tensor]()
        for name in self.inputs:
            if name not in feeds:
                raise InvalidRequestError(
                    "An input of the ONNX model is missing.", where=name, got=", ".join(feeds) or "no tensor"
                )
            if feeds[name].is_meta or feeds[name].layout is not torch.strided:
                raise InvalidTypeError(
                    f"{self.runtime} requires dense tensors with values.",
                    where=name,
                    got="a tensor on the meta device" if feeds[name].is_meta else str(feeds[name].layout),
                )
            tensor = self._placed(feeds[name].detach()).contiguous()
            if not self.shapes[name] and tensor.ndim:  # a Python number, which programs of torch take as a size
                tensor = torch.tensor(tensor.shape[-1])
            if tensor.dtype not in _DTYPES:
                raise InvalidTypeError(
                    f"This dtype has no counterpart in {self.runtime}.",
                    where=name,
                    expected=", ".join(dtype_name(dtype) for dtype in _DTYPES),
                    got=dtype_name(tensor.dtype),
                    hint="convert the input, for instance with .view(torch.uint8) or .to(torch.float32).",
                )
            given[name] = tensor
        try:
            return self._outputs(given)
        except RuntimeFailure:
            raise
        except Exception as error:
            raise RuntimeFailure(
                f"{self.runtime} refused the call.",
                where=shapes_text(given),
                got=_FAILED_CHECK if f"idx={REFUSED_INDEX} " in str(error) else first_line(error),
                hint=_REFUSES if "idx=" in str(error) else None,
            ) from error

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where the runtime takes it."""
        return tensor.cpu()

    def _outputs(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs by name, in order, for contiguous tensors."""
        raise NotImplementedError


class Session(GraphSession):
    """One ONNX model in onnxruntime.

    Args:
        model: Path of a file, or a serialised ModelProto.
        folder: Where the external weights of a serialised model are, if it has any.
        optimised: Whether onnxruntime may rewrite the graph.
        placement: What computes it; the CPU by default.

    Raises:
        MissingPackageError: if onnxruntime is not installed.
        RuntimeFailure: if it cannot load the model, or not start the first of the execution providers.
    """

    runtime = "onnxruntime"

    def __init__(
        self,
        model: str | Path | bytes,
        folder: Path | None = None,
        optimised: bool = True,
        *,
        placement: Placement | None = None,
    ) -> None:
        self._module = module = require_onnxruntime()
        self.placement = Placement() if placement is None else placement
        self._options, self._entries = self.placement.options, dict[str, str]()
        self._attributes: dict[str, Any] = {}
        if self._options is None:
            self._options = module.SessionOptions()
            self._options.log_severity_level = 4  # what fails is raised, not printed
            self._entries[_IDLE] = "1"
            if not optimised:
                self._entries["session.disable_prepacking"] = "1"  # not worth its time for a single run
        if not self.placement.is_cpu:
            self._entries[_ASSIGNMENT] = "1"
        if folder is not None:
            self._entries[_FOLDER] = str(folder)
        if folder is not None or not optimised:  # a graph for measurements
            self._attributes["enable_profiling"] = False
        if not optimised:
            self._attributes["graph_optimization_level"] = module.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._source = model if isinstance(model, bytes) else str(model)
        self._where = "serialised model" if isinstance(model, bytes) else str(model)
        self._folder = folder
        if not self.placement.is_cpu:
            self._source = self._for_device()
        self._open()
        self._dangers: tuple[bool, bool] | None = None  # of empty inputs; looked for when there are some
        self.shapes = {value.name: tuple(value.shape) for value in self._session.get_inputs()}
        self.inputs = list(self.shapes)
        self.outputs = [value.name for value in self._session.get_outputs()]
        values = (*self._session.get_inputs(), *self._session.get_outputs())
        self._is_bound = self.placement.device.type != "cpu" or any(value.type == _BFLOAT16 for value in values)
        self._booleans = {value.name for value in self._session.get_outputs() if value.type == _BOOL}

    def _open(self, **options: Any) -> None:
        try:
            session = self._opened(self._source, options)
        except Exception as error:
            session = self._opened_in_float32(options, error)
        wanted, started = self.placement.names[0], session.get_providers()
        if wanted not in started:  # onnxruntime goes on with what it could start
            raise RuntimeFailure(
                f"onnxruntime could not start {wanted}.",
                where=self._where,
                expected=", ".join(self.placement.names),
                got=", ".join(started),
                hint="its libraries are missing, or their version does not match this build of onnxruntime.",
            )
        self._session: onnxruntime.InferenceSession = session
        if self.placement.is_cpu:
            return
        by_provider = [(name == CPU, node) for name, node, _ in self._assigned()]
        on_cpu, on_device = ({node for is_cpu, node in by_provider if is_cpu is asked} for asked in (True, False))
        late = late_nodes(self._source, on_cpu, on_device)
        if late:
            raise RuntimeFailure(
                f"{wanted} does not compute all of a branch or loop, and onnxruntime would not wait for it.",
                where=", ".join(late[:_SHOWN]),
                hint='run this graph on the CPU, or export it without runtime="onnxruntime".',
            )

    def _for_device(self) -> str | bytes:
        """The model without branches that only the CPU has kernels for; their weights stay in the folder."""
        found = without_cpu_branches(self._source)
        if found is None:
            return self._source
        self._name_folder()
        return found

    def _name_folder(self) -> None:
        """Lets a serialised model find the weights that are in a file of their own beside the model."""
        if self._folder is None and isinstance(self._source, str):
            self._folder = Path(self._source).resolve().parent
            self._entries[_FOLDER] = str(self._folder)

    def _assigned(self) -> Iterator[tuple[str, str, str]]:
        """Yields the execution provider, the name and the operator of each node."""
        if hasattr(self._session, "get_provider_graph_assignment_info"):  # from onnxruntime 1.24 on
            for part in self._session.get_provider_graph_assignment_info():
                yield from ((part.ep_name, node.name, node.op_type) for node in part.get_nodes())

    def _opened(self, source: str | bytes, options: Mapping[str, Any]) -> Any:
        providers = [each if isinstance(each, str) else (each[0], {**each[1]}) for each in self.placement.providers]
        with _configured(self._options, self._entries, self._attributes):
            return self._module.InferenceSession(source, self._options, providers=providers, **options)

    def _opened_in_float32(self, options: Mapping[str, Any], error: Exception) -> Any:
        """The model with casts around operators that have no kernel for its dtype."""

        def opened(model: bytes) -> Any:
            self._name_folder()
            return self._opened(model, options)

        try:
            session, self.in_float32 = opened_with_float32(self._source, opened, error)
        except Exception as another:
            text = first_line(another)
            raise RuntimeFailure("onnxruntime cannot load the model.", where=self._where, got=text) from another
        return session

    @property
    def finding(self) -> str:
        """What computes the graph beside the CPU, and which operators computed in float32; or nothing."""
        found = []
        if not self.placement.is_cpu:
            found.append(f"onnxruntime computed with {self.placement.names[0]} on {self.placement.device}")
            counts = Counter(operator for provider, _, operator in self._assigned() if provider == CPU)
            if counts:
                listed = ", ".join(f"{count} {name}" for name, count in counts.most_common(_SHOWN))
                more = ", ..." if len(counts) > _SHOWN else ""
                found[0] += f"; {sum(counts.values())} operators ran on the CPU: {listed}{more}"
        if self.in_float32:
            found.append(
                f"onnxruntime has no kernels for {', '.join(self.in_float32)} in the model's dtype; they run in "
                "float32 between casts; the file keeps its dtype"
            )
        return "".join(f"{text}. " for text in found).rstrip()

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the CPU stays there, too: onnxruntime knows which of them the device needs."""
        return tensor if tensor.device.type == "cpu" else tensor.to(self.placement.device)

    def _outputs(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        is_empty = not all(tensor.numel() for tensor in given.values())
        if is_empty and self._dangers is None:
            self._dangers = _dangers(self._source)
            if self._dangers[1]:
                self._open(disabled_optimizers=[_FUSION_NOT_FOR_EMPTY])
        if is_empty and self._dangers and not self._dangers[0]:
            raise RuntimeFailure(
                "onnxruntime would crash: its operators GRU and LSTM do not accept empty inputs.",
                where=shapes_text(given),
                hint="call the model itself for empty inputs.",
            )
        if self._is_bound:
            return self._bound_outputs(given)
        arrays = self._session.run(self.outputs, {name: tensor.numpy() for name, tensor in given.items()})
        return dict(zip(self.outputs, map(torch.from_numpy, arrays), strict=True))

    def _bound_outputs(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs of a run on tensors where they are; onnxruntime moves those that it needs elsewhere."""
        device, binding = self.placement.device, self._session.io_binding()
        for name, tensor in given.items():
            place = tensor.device
            dtype, shape = ONNX_DTYPES[tensor.dtype], [*tensor.shape]
            binding.bind_input(name, place.type, place.index or 0, dtype, shape, tensor.data_ptr())
        for name in self.outputs:
            binding.bind_output(name, device.type, device.index or 0)
        if device.type == "cuda":  # onnxruntime computes on a stream of its own, and waits for it at the end
            torch.cuda.current_stream(device).synchronize()
        self._session.run_with_iobinding(binding)
        values = dict(zip(self.outputs, map(torch.utils.dlpack.from_dlpack, binding.get_outputs()), strict=True))
        return {name: value.view(torch.bool) if name in self._booleans else value for name, value in values.items()}


@dataclass(frozen=True)
class SessionRunner:
    """A session that takes the tensors of the model that the graph was exported from, by path.

    Attributes:
        session: The session.
        inputs: Leaf path by name of the graph's input.
        outputs: Leaf path by name of the graph's output.
        pairs: Paths of outputs that are pairs of real numbers in the graph, and complex in the model.
    """

    session: GraphSession
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    pairs: frozenset[str] = frozenset()

    def run(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the outputs by path.

        Args:
            tensors: The inputs by path; paths that the graph does not have are ignored.

        Raises:
            KeyError: if an input is missing.
            RuntimeFailure: if onnxruntime refuses the call.
        """
        results = self.session.run({name: _as_real(tensors[path]) for name, path in self.inputs.items()})
        found = {self.outputs[name]: tensor for name, tensor in results.items()}
        return {path: torch.view_as_complex(t) if path in self.pairs else t for path, t in found.items()}


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as ONNX has it, where a complex number is a pair along the last axis."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


@contextlib.contextmanager
def _configured(options: Any, entries: Mapping[str, str], attributes: Mapping[str, Any]) -> Iterator[None]:
    """Configures options of a session while it is opened: they may be the caller's, and cannot be copied.

    Entries stay: nothing removes them, and onnxruntime prints a warning when they are overwritten.
    """
    for name, value in entries.items():
        if _entry(options, name) != value:
            options.add_session_config_entry(name, value)
    before = {name: getattr(options, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(options, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(options, name, value)


def _entry(options: Any, name: str) -> str | None:
    """The value of a configuration entry; None if it is not set."""
    try:
        return str(options.get_session_config_entry(name))
    except RuntimeError:
        return None


def _dangers(source: str | bytes) -> tuple[bool, bool]:
    """Whether all operators of a model take empty inputs, and whether a fusion may make one that does not."""
    model = without_weights(source)
    takes_empty, moves_first_axis = True, False
    for graph in (model.graph, *model.functions):
        for node in all_nodes(graph):
            takes_empty = takes_empty and node.op_type not in _NOT_FOR_EMPTY
            if node.op_type == "Transpose":
                perm = next((list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"), [])
                moves_first_axis = moves_first_axis or (len(perm) > 2 and 0 in perm[-2:])
    return takes_empty, moves_first_axis
