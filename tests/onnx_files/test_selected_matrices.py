"""Products of rows with matrices selected from a stack, such as experts: no copy of a matrix for each row."""

import pytest
import torch

from exportkit.errors import RuntimeFailure
from exportkit.onnx_files.translate import onnx_program
from exportkit.running.session import Session


class Selected(torch.nn.Module):
    """Each row times the matrix whose number it has, as transformers computes its experts."""

    def __init__(self, count, transposed, dtype=torch.float32):
        super().__init__()
        sizes = (count, 5, 7) if transposed else (count, 7, 5)
        self.matrices = torch.nn.Parameter(torch.randn(sizes).to(dtype))
        self.transposed = transposed

    def forward(self, rows, numbers):
        selected = self.matrices[numbers]
        if self.transposed:
            return torch.bmm(selected, rows.unsqueeze(-1)).squeeze(-1)
        return torch.bmm(rows.unsqueeze(1), selected).squeeze(1)


def session(model, dtype=torch.float32):
    axis = {0: torch.export.Dim.DYNAMIC}
    args = torch.randn(6, 7).to(dtype), torch.randint(len(model.matrices), (6,))
    program = onnx_program(torch.export.export(model.eval(), args, dynamic_shapes=(axis, axis)))
    return Session(program.model_proto.SerializeToString()), [node.op_type for node in program.model.graph]


def run(graph, *args):
    (found,) = graph.run(dict(zip(("rows", "numbers"), args, strict=True))).values()
    return found


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("count", [1, 4, 60])
def test_products_equal_those_of_the_model(count, transposed):
    torch.manual_seed(0)
    model = Selected(count, transposed)
    graph, operators = session(model)
    assert "Scan" in operators
    assert "MatMul" not in operators
    for length in (0, 1, 2, 5, 64, 300, 2000):
        rows, numbers = torch.randn(length, 7), torch.randint(count, (length,))
        torch.testing.assert_close(run(graph, rows, numbers), model(rows, numbers), rtol=1e-5, atol=1e-5)
    for number in (0, count - 1, -1, -count):  # one matrix for all rows
        numbers, rows = torch.full((333,), number), torch.randn(333, 7)
        torch.testing.assert_close(run(graph, rows, numbers), model(rows, numbers), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes(dtype):
    torch.manual_seed(0)
    model = Selected(3, True, dtype)
    graph, operators = session(model, dtype)
    assert "Scan" in operators
    rows, numbers = torch.randn(20, 7).to(dtype), torch.randint(3, (20,))
    torch.testing.assert_close(run(graph, rows, numbers), model(rows, numbers), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("number", [4, -5])
def test_a_number_without_a_matrix_is_refused_as_in_torch(number):
    graph, _ = session(Selected(4, True))
    with pytest.raises(RuntimeFailure, match="out of"):
        run(graph, torch.randn(2, 7), torch.tensor([0, number]))


def test_numbers_that_are_written_to_after_the_selection_are_those_before():
    class Writing(Selected):
        def forward(self, rows, numbers):
            numbers = numbers + 0
            selected = self.matrices[numbers]
            numbers.zero_()
            return torch.bmm(selected, rows.unsqueeze(-1)).squeeze(-1)

    model = Writing(4, True)
    rows, numbers = torch.randn(3, 7), torch.tensor([1, 3, 2])
    torch.testing.assert_close(run(session(model)[0], rows, numbers), model(rows, numbers), rtol=1e-5, atol=1e-5)


def test_selected_matrices_that_are_returned_as_well_stay_as_they_are():
    class Both(Selected):
        def forward(self, rows, numbers):
            selected = self.matrices[numbers]
            return torch.bmm(selected, rows.unsqueeze(-1)).squeeze(-1), selected

    _, operators = session(Both(4, True))
    assert "Scan" not in operators
