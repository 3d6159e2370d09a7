"""Packed sequences keep each row's length: the last states, the rows and the padding are the ones of eager mode."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import exportkit


class Packing(torch.nn.Module):
    """Returns the padded outputs, the lengths, the packed rows and the last states of a recurrent layer."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(4, 6, **options)

    def forward(self, x, lengths, first=None):
        batch_first = self.layer.batch_first
        packed = pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=first is None)
        packed, last = self.layer(packed, first)
        return *pad_packed_sequence(packed, batch_first=batch_first, padding_value=0.5), packed.data, last


def call(model, lengths, has_first):
    layer, rows = model.layer, len(lengths)
    x = torch.randn(rows, max(lengths), 4)
    first = torch.randn(layer.num_layers * (1 + layer.bidirectional), rows, 6) if has_first else None
    return x if layer.batch_first else x.transpose(0, 1), torch.tensor(lengths), first


@pytest.mark.parametrize(
    ("model", "has_first"),
    [
        (Packing(torch.nn.LSTM, batch_first=True, proj_size=5), False),
        (Packing(torch.nn.GRU, bidirectional=True, bias=False), True),
        (Packing(torch.nn.RNN, num_layers=2, nonlinearity="relu"), False),
    ],
)
def test_sequences_of_different_lengths(model, has_first, tmp_path):
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for lengths in ([5, 3, 2], [7, 7, 4, 1]):
            model(*call(model, lengths, has_first))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    for lengths in ([9, 4, 3, 2, 2], [6]):
        made = call(model, lengths, has_first)
        torch.testing.assert_close(onnx_model(*made), model(*made))


@pytest.mark.parametrize("options", [{"bidirectional": True, "num_layers": 2, "batch_first": True}, {"bias": False}])
def test_projected_states_without_packing(options, tmp_path):
    model, observer = torch.nn.LSTM(4, 6, proj_size=3, **options), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for rows, length in ((2, 5), (3, 7)):
            model(torch.randn(rows, length, 4))
    report = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok, str(report)


def test_plain_recurrent_layers_without_packing_take_any_length(tmp_path):
    model = torch.nn.RNN(4, 6, nonlinearity="relu", bidirectional=True, num_layers=2)
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for length, rows in ((5, 2), (7, 3)):
            model(torch.randn(length, rows, 4))
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    x = torch.randn(9, 1, 4)
    torch.testing.assert_close(onnx_model(x), model(x))


def test_lengths_as_a_list_of_numbers(tmp_path):
    class OfMask(Packing):
        def forward(self, x, mask):
            return self.layer(pack_padded_sequence(x, mask.sum(0).tolist(), enforce_sorted=False))[1]

    model, observer = OfMask(torch.nn.GRU), exportkit.InputObserver()
    masks = [torch.ones(5, 3), torch.arange(7)[:, None] < torch.tensor([2, 7, 1, 4])]
    with observer(model), torch.no_grad():
        for mask in masks:
            model(torch.randn(*mask.shape, 4), mask.long())
    exported = exportkit.export(model, observer)
    x, mask = torch.randn(4, 2, 4), (torch.arange(4)[:, None] < torch.tensor([3, 1])).long()
    torch.testing.assert_close(exported.program.module()(x=x, mask=mask), model(x, mask))


class OfRowsWithTokens(torch.nn.Module):
    """Runs a recurrent layer on rows that are not empty, and returns its outputs and their number."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.GRU(4, 6, batch_first=True)

    def forward(self, x, lengths):
        length, is_given = x.shape[1], lengths > 0
        given = lengths[is_given]
        if given.shape[0] == 0:
            return x.new_zeros(0, length, 6)
        rows = torch.masked_select(x, is_given.view(-1, 1, 1)).view(-1, length, 4)
        packed, _ = self.layer(pack_padded_sequence(rows, given.cpu(), batch_first=True, enforce_sorted=False))
        return pad_packed_sequence(packed, batch_first=True, total_length=length)[0]


def test_rows_without_tokens_are_left_out(tmp_path):
    model, observer = OfRowsWithTokens(), exportkit.InputObserver()
    calls = [(torch.randn(len(lengths), 6, 4), torch.tensor(lengths)) for lengths in ([3, 0, 5], [2, 6, 4, 0])]
    with observer(model), torch.no_grad():
        for x, lengths in calls:
            model(x, lengths)
    onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    for lengths in ([1, 4, 0, 0, 6], [0, 2]):
        call = torch.randn(len(lengths), 6, 4), torch.tensor(lengths)
        torch.testing.assert_close(onnx_model(*call), model(*call))
