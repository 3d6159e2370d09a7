"""Packed sequences in a trace: the layers that take them run over the padded ones, with a mask.

``pack_padded_sequence`` gives one row for each token, time by time, and how many rows there are at each time. A
recurrent layer goes over these rows in Python, as often as the longest sequence has tokens. Here it is one loop over
the padded sequences, in which a state stays as it is beyond the end of its sequence; the rows, the last states and the
padding are the same as torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from exportkit._torch_compat.loop_operators import scan
from exportkit._torch_compat.modules import recurrent_functions
from exportkit._torch_compat.traced_values import asserted, at_most
from exportkit.overrides import Attribute, replaced
from exportkit.rewrites.lengths import Int

PACK = "_pack_padded_sequence"  # the function that packs sequences of different lengths for a recurrent layer
_State = tuple[torch.Tensor, ...]
_Cell = Callable[[torch.Tensor, _State, list[Any]], _State]


class Filled:
    """Stands for the batch sizes of a packed sequence: which tokens of the padded one there are.

    Args:
        mask: Whether there is a token, by time and sequence.
    """

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask, self.device = mask, torch.device("cpu")
        self._positions = mask.flatten().cumsum(0).sub(1).clamp(min=0).reshape(mask.shape)

    def __getitem__(self, index: int) -> Any:
        if index != 0:  # any other batch size is data
            raise TypeError("only the first batch size of a packed sequence is known in a trace")
        return self.mask.shape[1]

    def size(self, _axis: int) -> Any:
        """Returns the length of the longest sequence."""
        return at_most(self.lengths().max().item(), self.mask.shape[0])

    def lengths(self) -> torch.Tensor:
        """Returns the length of each sequence."""
        return self.mask.sum(0)

    def packed(self, padded: torch.Tensor) -> torch.Tensor:
        """Returns the tokens of padded sequences, whose first axis is time."""
        return padded.flatten(0, 1).index_select(0, self.mask.flatten().nonzero().squeeze(1))

    def padded(self, packed: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """Returns the padded sequences of packed tokens."""
        return self.masked(packed[self._positions], torch.full((), value, dtype=packed.dtype))

    def masked(self, padded: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Returns padded sequences with other values where there is no token."""
        return torch.where(self.mask.reshape(*self.mask.shape, *[1] * (padded.ndim - 2)), padded, other)

    def reversed(self, padded: torch.Tensor) -> torch.Tensor:
        """Returns padded sequences each of which runs from its last token to its first."""
        times = torch.arange(self.mask.shape[0])[:, None]
        last_first = torch.where(self.mask, self.lengths() - 1 - times, times)
        return padded.gather(0, last_first.unsqueeze(-1).expand_as(padded))


def masked_layers(_model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Replaces packing, padding and the recurrent layers for packed sequences."""
    functions, layers = recurrent_functions()
    replacements: list[tuple[Any, Any]] = [
        (Attribute(layers, "int"), Int),
        (Attribute(functions, PACK), _pack),
        (Attribute(functions, "_pad_packed_sequence"), _pad),
    ]
    for name, cell in _CELLS.items():
        replacements.append((Attribute(functions, name), _layers(getattr(functions, name), cell)))
    return replaced(replacements)


def _pack(padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, Filled]:
    padded = padded.transpose(0, 1) if batch_first else padded
    is_valid = (lengths > 0) & (lengths <= padded.shape[0])
    asserted(is_valid.all(), "lengths of packed sequences are from 1 to the padded length")
    filled = Filled(torch.arange(padded.shape[0])[:, None] < lengths)
    return filled.packed(padded), filled


def _pad(
    packed: torch.Tensor, filled: Filled, batch_first: bool, value: float, length: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    padded = filled.padded(packed, value)
    missing = padded.new_full((1, *padded.shape[1:]), value)
    places = torch.arange(length).clamp(max=padded.shape[0])  # there may be more than all tokens have
    padded = torch.cat([padded, missing]).index_select(0, places)
    return padded.transpose(0, 1) if batch_first else padded, filled.lengths()


def has_projected_layers(model: torch.nn.Module, _named: Mapping[str, Any]) -> bool:
    """Returns whether a model has an LSTM with a projection of its output."""
    return any(isinstance(module, torch.nn.LSTM) and module.proj_size for module in model.modules())


def projected_layers(_model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Replaces LSTM with a projection of its output, which ONNX does not have, by loops over the tokens."""
    functions, _ = recurrent_functions()
    original = functions.lstm

    def run(data: torch.Tensor, first: Any, *others: Any) -> Any:
        if isinstance(first, torch.Tensor | Filled):  # a packed sequence
            return original(data, first, *others)
        weights, has_biases, count, _, _, is_bidirectional, _ = others
        if len(weights) == count * (1 + is_bidirectional) * (4 if has_biases else 2):
            return original(data, first, *others)
        return recurrence("lstm")(data, first, *others)

    return replaced([(Attribute(functions, "lstm"), run)])


def recurrence(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns what stands for the function of a recurrent layer: one loop operator for each layer and direction.

    Args:
        name: The function, such as ``rnn_tanh``.
    """

    def run(data: torch.Tensor, first: Any, *others: Any) -> tuple[torch.Tensor, ...]:
        *options, batch_first = others
        tokens = data.transpose(0, 1) if batch_first else data
        found, *states = _through(_CELLS[name], None, tokens, first, *options)
        return found.transpose(0, 1) if batch_first else found, *states

    return run


def layers_in_loops() -> list[tuple[Any, Any]]:
    """Returns what lets the body of a loop operator call recurrent layers, as decoders do for each token.

    torch cannot compile the layers there, as they set attributes of their own.
    """
    return [(Attribute(cls, "forward"), _in_loops(cls.forward)) for cls in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN)]


def _in_loops(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return original(self, input, hx)
        if not isinstance(input, torch.Tensor):
            raise TypeError("a packed sequence is made in a loop")
        is_pair, time = self.mode == "LSTM", 1 if self.batch_first and input.ndim > 2 else 0
        tokens = (input if input.ndim > 2 else input.unsqueeze(1)).movedim(time, 0)
        if hx is None:
            shape = len(self.all_weights), tokens.shape[1]
            first = [tokens.new_zeros(*shape, self.proj_size or self.hidden_size)]
            first += [tokens.new_zeros(*shape, self.hidden_size)] if is_pair else []
        else:
            first = [part if input.ndim > 2 else part.unsqueeze(1) for part in (hx if is_pair else (hx,))]
        is_unrolled = isinstance(tokens.shape[0], int)  # few tokens, usually one
        weights = [weight for layer in self.all_weights for weight in layer]
        options = self.bias, self.num_layers, self.dropout, self.training, self.bidirectional
        found, *last = _through(_CELLS[self.mode.lower()], None, tokens, first, weights, *options, is_unrolled)
        found = found.movedim(0, time)
        if input.ndim == 2:
            found, last = found.squeeze(1), [state.squeeze(1) for state in last]
        return found, tuple(last) if is_pair else last[0]

    return forward


def _layers(original: Callable[..., Any], cell: _Cell) -> Callable[..., Any]:
    """The function of a recurrent layer that also takes packed sequences of a trace."""

    def run(data: torch.Tensor, filled: Any, *others: Any) -> Any:
        if not isinstance(filled, Filled):
            return original(data, filled, *others)
        found, *states = _through(cell, filled, filled.padded(data), *others)
        return filled.packed(found), *states

    return run


def _through(  # noqa: PLR0917 (torch's positions)
    cell: _Cell,
    filled: Filled | None,
    sequences: torch.Tensor,
    first: Any,
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    count: int,
    dropout: float,
    is_training: bool,
    is_bidirectional: bool,
    is_unrolled: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The padded outputs of all layers, and their last states."""
    directions = 2 if is_bidirectional else 1
    per_layer = len(weights) // (count * directions)
    states = first if isinstance(first, tuple | list) else (first,)
    last = []
    for layer in range(count):
        found = []
        for direction in range(directions):
            index = layer * directions + direction
            own: list[Any] = list(weights[index * per_layer : (index + 1) * per_layer])
            if not has_biases:
                own[2:2] = [None, None]
            reverse = (lambda tensor: tensor.flip(0)) if filled is None else filled.reversed
            given = reverse(sequences) if direction else sequences
            before = tuple(state[index] for state in states)
            state, outputs = (
                _run_unrolled(cell, given, before, own) if is_unrolled else _run(cell, filled, given, before, own)
            )
            found.append(reverse(outputs) if direction else outputs)
            last.append(state)
        sequences = torch.cat(found, dim=-1)
        if layer < count - 1:
            sequences = torch.dropout(sequences, dropout, is_training)
    return sequences, *(torch.stack(state) for state in zip(*last, strict=True))


def _run(
    cell: _Cell, filled: Filled | None, sequences: torch.Tensor, state: _State, weights: list[Any]
) -> tuple[_State, torch.Tensor]:
    """The last state of one layer in one direction, and its outputs."""
    inputs = torch.nn.functional.linear(sequences, *weights[:3:2])

    def step(state: _State, token: tuple[torch.Tensor, ...]) -> tuple[_State, torch.Tensor]:
        new = cell(token[0], state, weights[1:2] + weights[3:])
        after = new if filled is None else [torch.where(token[1], *pair) for pair in zip(new, state, strict=True)]
        return tuple(after), new[0].clone()

    # a view starts at an offset, which the loop operator makes a number
    tokens = (inputs,) if filled is None else (inputs, filled.mask.unsqueeze(-1))
    last, outputs = scan(step, tuple(part.clone() for part in state), tokens)
    return last, outputs


def _run_unrolled(
    cell: _Cell, sequences: torch.Tensor, state: _State, weights: list[Any]
) -> tuple[_State, torch.Tensor]:
    """The same for few tokens, which are not made a loop."""
    inputs, found = torch.nn.functional.linear(sequences, *weights[:3:2]), []
    for place in range(inputs.shape[0]):
        state = cell(inputs[place], state, weights[1:2] + weights[3:])
        found.append(state[0])
    return state, torch.stack(found)


def _lstm(inputs: torch.Tensor, state: _State, weights: list[Any]) -> _State:
    hidden, memory = state
    kernel, bias, *projection = weights
    enter, forget, new, leave = (inputs + torch.nn.functional.linear(hidden, kernel, bias)).chunk(4, -1)
    memory = forget.sigmoid() * memory + enter.sigmoid() * new.tanh()
    hidden = leave.sigmoid() * memory.tanh()
    return (torch.nn.functional.linear(hidden, *projection) if projection else hidden), memory


def _gru(inputs: torch.Tensor, state: _State, weights: list[Any]) -> _State:
    (hidden,) = state
    reset, update, new = inputs.chunk(3, -1)
    from_reset, from_update, from_new = torch.nn.functional.linear(hidden, *weights).chunk(3, -1)
    new = (new + (reset + from_reset).sigmoid() * from_new).tanh()
    return ((hidden - new) * (update + from_update).sigmoid() + new,)


def _rnn(activation: Callable[[torch.Tensor], torch.Tensor]) -> _Cell:
    return lambda inputs, state, weights: (activation(inputs + torch.nn.functional.linear(state[0], *weights)),)


_CELLS: dict[str, _Cell] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": _rnn(torch.tanh),
    "rnn_relu": _rnn(torch.relu),
}
