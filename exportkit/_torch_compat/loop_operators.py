"""Loop operators of torch, and the graphs that they run."""

from __future__ import annotations

import re
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from exportkit._torch_compat import require
from exportkit._torch_compat.graph import with_graph_module
from exportkit._torch_compat.memory import memory_state
from exportkit._torch_compat.pytree import tree_map


def scan(step: Callable[[Any, Any], tuple[Any, Any]], state: Any, inputs: Any) -> tuple[Any, Any]:
    """Returns the last state and the stacked outputs of a loop over the first axis. Seen in torch 2.13.

    torch.onnx.export translates it to the ONNX operator Scan.

    Args:
        step: Maps the state and one slice of the inputs to the next state and one slice of the outputs.
        state: The first state, a nested value of tensors with the shapes and dtypes that the step returns.
        inputs: A nested value of tensors whose first axis is the loop.
    """
    import torch._higher_order_ops as operators

    return require(operators, "scan")(step, state, inputs)  # type: ignore[no-any-return]


def while_loop(
    goes_on: Callable[..., torch.Tensor], iteration: Callable[..., tuple[torch.Tensor, ...]], state: tuple[Any, ...]
) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that a loop leaves once a test of them does not hold. Seen in torch 2.13.

    torch.onnx.export translates it to the ONNX operator Loop.

    Args:
        goes_on: Returns whether there is another iteration, given the tensors.
        iteration: Returns tensors of the same shapes and dtypes.
        state: The tensors before the loop.
    """
    import torch._higher_order_ops as operators

    return require(operators, "while_loop")(goes_on, iteration, state)  # type: ignore[no-any-return]


def without_aliases(body: types.FunctionType) -> types.FunctionType:
    """Returns the body of a loop with copies of tensors from around it that share their memory, as two chunks do.

    torch makes no operator of a body that gets two views of one tensor. Seen in torch 2.13.

    Args:
        body: The function.
    """
    seen: set[int] = set()

    def own(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return tensor
        storage, _ = memory_state(tensor)
        if storage in seen:
            return tensor.clone()
        seen.add(storage)
        return tensor

    def without(cell: types.CellType) -> types.CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # the name stands for nothing yet
            return cell
        is_plain = isinstance(content, torch.Tensor) or type(content) in (list, tuple, dict)
        return types.CellType(tree_map(own, content)) if is_plain else cell

    closure = tuple(map(without, body.__closure__ or ()))
    return types.FunctionType(body.__code__, body.__globals__, body.__name__, body.__defaults__, closure)


_RAISED = re.compile(r"raised exception \w+\(['\"](?P<text>.+)['\"]")
_CONSTANT = re.compile(r"ConstantVariable\(str: (['\"])(?P<text>.+)\1\)")
_DIFFERENT = re.compile(r"differ in '(?P<what>shape|dtype)")
_USER_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in')


def why_no_operator(error: BaseException) -> tuple[str, list[tuple[str, int]]] | None:
    """Returns why torch could not make an operator of a loop, and the lines of its body; None for other errors.

    Seen in torch 2.13, which compiles the body and puts the reason in the text of the error.
    """
    message = str(error)
    if "higher order operator" not in message.lower():
        return None
    if raised := _RAISED.search(message) or _CONSTANT.search(message):
        text = raised["text"]
    elif different := _DIFFERENT.search(message):
        text = f"an iteration changes the {different['what']} of a tensor that the next iteration gets"
    elif "ata-dependent" in message:
        text = "the body branches on the value of a tensor, or on the number of the iteration"
    elif "side effect" in message:
        text = "the body changes an object that is not its own"
    else:
        lines = [line.strip() for line in message.partition("Higher Order Operator")[0].splitlines() if line.strip()]
        text = lines[-1]
    return text, lines_compiled(error)


def lines_compiled(error: BaseException) -> list[tuple[str, int]]:
    """Returns the lines of a loop's body that torch was compiling, outermost first. Seen in torch 2.13."""
    _, _, code = str(error).partition("from user code:")
    return [(found["file"], int(found["line"])) for found in _USER_LINE.finditer(code)]


def recurrent_kernels() -> dict[Any, Callable[..., Any]]:
    """Returns, by operator, what a trace computes of recurrent layers, whose operators stay nodes of the graph.

    Only the shapes of the results count then. Where operators are decomposed, the layer becomes torch's own loop
    operator, whose body torch compiles. Seen in torch 2.13.
    """
    import torch.export._patches as patches
    from torch.fx.experimental import proxy_tensor

    is_decomposed = require(proxy_tensor, "get_proxy_mode")

    def kernel(loop: Callable[..., Any]) -> Callable[..., Any]:
        def run(tokens: torch.Tensor, first: Any, *others: Any) -> Any:
            if is_decomposed() is not None or type(tokens) is torch.Tensor:  # a tensor with values
                return loop(tokens, first, *others)
            *_, is_bidirectional, batch_first = others
            states = [first] if isinstance(first, torch.Tensor) else first
            sizes = tokens.transpose(0, 1).shape if batch_first else tokens.shape
            found = tokens.new_empty((*sizes[:-1], states[0].shape[-1] * (1 + is_bidirectional)))
            return found.transpose(0, 1) if batch_first else found, *map(torch.empty_like, states)

        return run

    aten = torch.ops.aten
    return {
        aten.lstm.input: kernel(require(patches, "lstm_while_loop_impl")),
        aten.gru.input: kernel(require(patches, "gru_while_loop_impl")),
    }


def loops_compiled_afresh() -> tuple[Any, dict[str, Any]]:
    """Returns the attribute to replace, with its owner, so that loop operators are not compiled for an earlier trace.

    torch compiles the function around a loop operator, and keeps what it compiled with the function's code. What was
    made for 300 steps would be looked at in the next trace, and the comparison would fix the length of the loop there.
    Seen in torch 2.13.
    """
    from torch._dynamo import eval_frame
    from torch._higher_order_ops import utils

    original = require(utils, "_hop_compile_and_call")
    reset_code = require(eval_frame, "reset_code")
    seen: set[Any] = set()

    def compiled(function: Any, *arguments: Any) -> Any:
        if function.__code__ not in seen:
            seen.add(function.__code__)
            reset_code(function.__code__)
        return original(function, *arguments)

    return utils, {"_hop_compile_and_call": compiled}


def sizes_seen_afresh() -> tuple[Any, dict[str, Any]]:
    """Returns the attribute to replace, with its owner, so that loop operators know nothing of sizes of earlier calls.

    torch makes a size dynamic if it was different when the function around a loop operator was compiled before, also in
    eager mode. A number in a trace would become a symbol that the trace does not know. Seen in torch 2.13.
    """
    from torch._dynamo import pgo

    require(pgo, "_CODE_STATE")
    return pgo, {"_CODE_STATE": defaultdict(require(pgo, "CodeState"))}


def sizes_in_loops() -> tuple[Any, dict[str, Any]]:
    """Returns the attribute to replace, with its owner, so that loop bodies may use sizes that their tensors have, too.

    torch notes where the size of an intermediate result can be read, and makes a node of that once it is needed. For a
    size that the code around the loop reads, it forgets to make the node. Seen in torch 2.13.
    """
    from torch._dynamo import output_graph

    tracer = require(output_graph, "SubgraphTracer")
    noted = require(output_graph, "LazyProxy")
    original = require(tracer, "lift_tracked_freevar_to_input")

    def lift_tracked_freevar_to_input(self: Any, proxy: Any) -> Any:
        found = original(self, proxy)
        if isinstance(found, noted):
            found = found()
            self.bound_symbols[proxy.node.meta["example_value"].node.expr] = found
        return found

    return tracer, {"lift_tracked_freevar_to_input": lift_tracked_freevar_to_input}


def constants_in_loops() -> tuple[Any, dict[str, Any]]:
    """Returns the attribute to replace, with its owner, so that loop bodies may use plain tensors, too.

    torch copies what a body uses with the same memory alignment, and reads the address of the copy. In a trace, the
    copy of a plain tensor, neither a parameter nor a buffer, has no address. Seen in torch 2.13.
    """
    from torch._dynamo import utils

    original = require(utils, "clone_input")
    is_tracing = require(utils, "detect_fake_mode")

    def clone_input(tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and is_tracing() is not None:
            return tensor.detach().clone().to(dtype or tensor.dtype)
        return original(tensor, dtype=dtype)  # type: ignore[no-any-return]

    return utils, {"clone_input": clone_input}


def with_constants_outside(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program with the constants in the graphs of loop operators as inputs of these operators.

    torch.export lifts the constants of the program's own graph only. Others, such as the number in
    ``scores[mask] = -1.0`` in a loop, stay buffers of the loop's graph. When torch decomposes operators, it puts
    tensors in place of all buffers that only the outermost graph can use. Seen in torch 2.13.
    """
    constants = {node.name: tensor for node, tensor in _lifted(program.graph_module, is_outermost=True)}
    return with_graph_module(program, program.graph_module, constants) if constants else program


def _lifted(module: torch.fx.GraphModule, is_outermost: bool = False) -> list[tuple[torch.fx.Node, torch.Tensor]]:
    """Makes constants inputs of a loop's graph, and of the loops in it; returns the placeholders with the values."""
    graph, found, names = module.graph, list[tuple[torch.fx.Node, torch.Tensor]](), set[str]()

    def placeholder(meta: dict[str, Any], tensor: torch.Tensor) -> torch.fx.Node:
        first, *_, last = [next(iter(graph.nodes)), *graph.find_nodes(op="placeholder")]
        with graph.inserting_before(first) if is_outermost else graph.inserting_after(last):
            node = graph.placeholder(f"loop_constant_{len(found)}")
        node.meta = dict(meta)
        found.append((node, tensor))
        return node

    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.scan:
            step, state, inputs, others = node.args
            inner = [placeholder(each.meta, tensor) for each, tensor in _lifted(getattr(module, step.target))]
            node.args = (step, state, inputs, (*others, *inner))
        elif node.target is torch.ops.higher_order.while_loop:
            inner = [placeholder(each.meta, tensor) for each, tensor in _lifted_together(module, node.args[:2])]
            node.args = (*node.args[:3], (*node.args[3], *inner))
        elif node.op == "get_attr" and isinstance(tensor := getattr(module, str(node.target)), torch.Tensor):
            node.replace_all_uses_with(placeholder(node.meta, tensor))
            graph.erase_node(node)
            names.add(str(node.target))
    for name in names:
        delattr(module, name)
    if found:
        module.recompile()
    return found


def _lifted_together(
    module: torch.fx.GraphModule, graphs: Sequence[torch.fx.Node]
) -> list[tuple[torch.fx.Node, torch.Tensor]]:
    """The same for two graphs that get the same inputs: each gets the constants of the other one, too."""
    first, second = (getattr(module, str(node.target)) for node in graphs)
    found = _lifted(first)
    _take(second, found)
    own = _lifted(second)
    _take(first, own)
    return [*found, *own]


def _take(module: torch.fx.GraphModule, inputs: Sequence[tuple[torch.fx.Node, torch.Tensor]]) -> None:
    for node, _ in inputs:
        *_, last = module.graph.find_nodes(op="placeholder")
        with module.graph.inserting_after(last):
            module.graph.placeholder(node.name).meta = dict(node.meta)
    module.recompile()
