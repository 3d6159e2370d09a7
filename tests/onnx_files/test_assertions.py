"""Run-time assertions are taken out of a program for ONNX, with what only they read, and nothing else."""

import torch

from exportkit.onnx_files.preparation import without_assertions


class Checked(torch.nn.Module):
    """Asserts on a value, and writes in place, which looks as if nobody used it."""

    def forward(self, x, mask):
        torch._check(mask.sum().item() >= 0, lambda: "no negative sum")
        torch._assert_async((x * 2 == x + x).all())
        y = x * 2
        y[:, 0] = 7.0
        return y


def program():
    shapes = {"x": {0: torch.export.Dim.DYNAMIC}, "mask": {0: torch.export.Dim.DYNAMIC}}
    return torch.export.export(Checked(), (torch.ones(3, 4), torch.ones(5)), dynamic_shapes=shapes)


def targets(exported):
    return [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]


def test_assertions_and_their_feeders_go():
    before = program()
    assert any("assert" in target for target in targets(before))
    after = targets(without_assertions(before))
    assert not any("assert" in target or "item" in target for target in after)


def test_what_writes_in_place_stays():
    after = without_assertions(program())
    x = torch.randn(2, 4)
    assert torch.equal(after.module()(x, torch.ones(2))[:, 0], torch.full((2,), 7.0))
    assert torch.equal(after.module()(x, torch.ones(2))[:, 1:], x[:, 1:] * 2)


def test_the_program_itself_is_left_as_it_was():
    before = program()
    text = str(before.graph)
    without_assertions(before)
    assert str(before.graph) == text


def test_a_program_without_assertions_is_returned_as_it_is():
    plain = torch.export.export(torch.nn.Linear(4, 2), (torch.ones(3, 4),))
    assert without_assertions(plain) is plain


def test_inputs_called_like_a_function_of_python_keep_their_names():
    class OfInput(torch.nn.Module):
        def forward(self, input, len):
            return input.to(torch.float64) + len.abs()

    before = torch.export.export(OfInput(), (torch.ones(3), torch.ones(3)))
    after = without_assertions(before)
    assert after is not before
    assert after.graph_signature.user_inputs == ("input", "len")
    assert torch.equal(after.module()(torch.ones(3), torch.ones(3)), torch.full((3,), 2.0, dtype=torch.float64))
