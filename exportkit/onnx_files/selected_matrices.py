"""Products of rows with matrices that are selected from a stack: the experts of a mixture, one for each row.

torch and ONNX would copy the selected matrix for each row: 25 GB for 2048 tokens that go through two experts of 1.5
million weights each. Here, rows with the same matrix are packed into blocks, and the graph loops over the blocks with
one matrix at a time. Blocks are the idea of MegaBlocks (Gale et al., https://arxiv.org/abs/2211.15841).
"""

from __future__ import annotations

from typing import Any

import onnx_ir
import torch
from onnx_ir.tape import Tape

from exportkit._torch_compat.graph import copied_module, with_graph_module, written_tensors
from exportkit.onnx_files.constants import constant, ints, op
from exportkit.onnx_files.preparation import erase_unused

aten = torch.ops.aten

# Rows in a block at most. Measured with 4 experts and up to 2048 tokens: 32 is a fifth slower than 64, 256 no faster.
_LARGEST_BLOCK = 128
_DTYPES = (torch.float32, torch.float64, torch.float16)  # for which onnxruntime has kernels on the CPU


@torch.library.custom_op(
    "exportkit::selected_products",
    mutates_args=(),
    schema="(Tensor rows, Tensor matrices, Tensor numbers, bool transposed) -> Tensor",
)
def _selected_products(rows: Any, matrices: Any, numbers: Any, transposed: bool) -> torch.Tensor:
    selected = matrices[numbers]
    return torch.bmm(rows.unsqueeze(1), selected.mT if transposed else selected).squeeze(1)


@_selected_products.register_fake
def _fake_products(rows: Any, matrices: Any, _numbers: Any, transposed: bool) -> torch.Tensor:
    result: torch.Tensor = rows.new_empty((rows.shape[0], matrices.shape[1 if transposed else 2]))
    return result


# Where a program has such products.


def with_selected_products(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns the program with such products as operators, which are written as loops in ONNX."""
    if not any(map(_product, program.graph.nodes)):
        return program
    module = copied_module(program)
    written = {node for family, _ in written_tensors(module.graph).values() for node in family}
    for node in list(module.graph.nodes):
        if (arguments := _product(node)) is not None and written.isdisjoint(arguments):
            old = node.all_input_nodes
            node.target, node.args, node.kwargs = torch.ops.exportkit.selected_products.default, arguments, {}
            erase_unused(old)
    return with_graph_module(program, module)


def _product(node: Any) -> tuple[Any, ...] | None:
    """The rows, the matrices and their numbers, and whether they are transposed, of a product without its axis of 1."""
    if node.target is not aten.squeeze.dim or (product := _step(node.args[0], aten.bmm.default)) is None:
        return None
    axis = node.args[1] % 3
    selected, single = product.args if axis == 2 else product.args[::-1]
    selected, single = _step(selected, aten.index.Tensor), _step(single, aten.unsqueeze.default)
    if axis == 0 or selected is None or single is None or single.args[1] % 3 != axis or len(selected.args[1]) != 1:
        return None
    matrices, (numbers,) = selected.args
    sizes, index = matrices.meta["val"].shape, numbers.meta["val"]
    if len(sizes) != 3 or not all(isinstance(size, int) and size for size in sizes):
        return None
    if index.ndim != 1 or index.dtype not in (torch.int64, torch.int32) or matrices.meta["val"].dtype not in _DTYPES:
        return None
    return single.args[0], matrices, numbers, axis == 2


def _step(value: Any, target: Any) -> Any:
    """The node that computes a value by an operator, and which nothing else reads."""
    return value if value.target is target and len(value.users) == 1 else None


# Their form in ONNX.


def _form(rows: Any, matrices: Any, numbers: Any, transposed: bool) -> Any:
    count, width = matrices.shape[0], matrices.shape[1 if transposed else 2]
    first, second, start = ints(0), ints(1), op.Constant(value_int=0)
    numbers = op.Cast(numbers, to=onnx_ir.DataType.INT64)
    positive = op.Where(op.Less(numbers, start), op.Add(numbers, ints(count)), numbers)
    every = ints(*range(count))
    chosen = op.Cast(op.Equal(op.Unsqueeze(positive, second), every), to=onnx_ir.DataType.INT64)  # (rows, count)
    # as many rows in a block as each matrix has on average; there is one block at least, since Scan takes no fewer
    size = op.Div(op.Shape(rows, start=0, end=1), ints(count))
    size = op.Where(
        op.Less(size, second), second, op.Where(op.Less(size, ints(_LARGEST_BLOCK)), size, ints(_LARGEST_BLOCK))
    )
    blocks = op.Div(op.Sub(op.Add(op.ReduceSum(chosen, first, keepdims=0), size), second), size)
    ends = op.CumSum(blocks, start)
    total = op.ReduceSum(blocks, first, keepdims=1)
    total = op.Where(op.Less(total, second), second, total)
    # where the rows go: behind the rows before them that have the same matrix
    place = op.Sub(op.ReduceSum(op.Mul(op.CumSum(chosen, start), chosen), second, keepdims=0), second)
    place = op.Add(op.Gather(op.Mul(op.Sub(ends, blocks), size), numbers), place)
    columns = op.Shape(rows, start=1, end=2)
    zero = constant(0.0, rows.dtype)
    packed = op.ScatterND(
        op.Expand(zero, op.Concat(op.Mul(total, size), columns, axis=0)), op.Unsqueeze(place, second), rows
    )
    packed = op.Reshape(packed, op.Concat(total, size, columns, axis=0))
    # the number of each block is the number of matrices whose blocks end before it
    steps = op.Range(start, op.Squeeze(total, first), op.Constant(value_int=1))
    ended = op.Cast(op.LessOrEqual(op.Unsqueeze(ends, first), op.Unsqueeze(steps, second)), to=onnx_ir.DataType.INT64)
    which = op.ReduceSum(ended, second, keepdims=0)
    which = op.Where(op.Less(which, ints(count)), which, first)
    body = _block_product(rows, matrices, width, transposed)
    products = op.Scan(packed, which, body=body, num_scan_inputs=2)
    return op.Gather(op.Reshape(products, ints(-1, width)), place)


def _block_product(rows: Any, matrices: Any, width: int, transposed: bool) -> onnx_ir.Graph:
    """The body of the loop: one block times one matrix."""
    block = onnx_ir.Value(name="block", type=rows.type, shape=onnx_ir.Shape([None, rows.shape[1]]))
    number = onnx_ir.Value(name="number", type=onnx_ir.TensorType(onnx_ir.DataType.INT64), shape=onnx_ir.Shape([]))
    tape = Tape()
    product = tape.op("Gemm", [block, tape.op("Gather", [matrices, number])], {"transB": int(transposed)})
    product.type, product.shape = rows.type, onnx_ir.Shape([None, width])
    return onnx_ir.Graph([block, number], [product], nodes=tape.nodes, name="block_product")


SELECTED_TRANSLATIONS = {torch.ops.exportkit.selected_products.default: _form}
