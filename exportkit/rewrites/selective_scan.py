"""The selective scan of state-space mixers as one loop operator, over any number of tokens and from any state.

transformers loops over the tokens in Python, which a trace unrolls, and its function starts at a state of zeros, as the
kernels that it stands for do. Here the loop is torch's scan, and it starts at the state that the mixer read from its
cache: several tokens on a filled cache give what they give one by one.
Recurrence: Gu and Dao, Mamba, 2023 (arXiv:2312.00752), equations 1a and 2.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from exportkit._torch_compat.graph import scan
from exportkit.rewrites.attributes import replaced_attributes
from exportkit.rewrites.functions import has_function, replaced_function

_FUNCTION = "mamba_selective_scan"


def has_selective_scan(model: torch.nn.Module, _arguments: Mapping[str, Any]) -> bool:
    """Returns whether mixers in the model call transformers' selective scan."""
    return has_function(model, _FUNCTION)


@contextlib.contextmanager
def traced_selective_scan(model: torch.nn.Module) -> Iterator[None]:
    """Puts the loop operator in place of the Python loop."""
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    if cache is None:
        yield
        return
    read = _ReadStates(cache.get_recurrent_state)
    with (
        replaced_attributes(cache, {"get_recurrent_state": read.method()}),
        replaced_function(model, _FUNCTION, read.selective_scan),
    ):
        yield


class _ReadStates:
    """The states that a mixer has read from its cache and not used yet: the scan has no argument for them."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self._local = threading.local()

    def method(self) -> Any:
        """What takes the place of the cache's method that returns a state."""

        def get_recurrent_state(cache: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
            state: torch.Tensor | None = self._original(cache, *args, **kwargs)
            self._local.states = [] if state is None else self._by_scan(state)
            return state

        return get_recurrent_state

    @staticmethod
    def _by_scan(state: torch.Tensor) -> list[torch.Tensor]:
        """A state (batch, channels, size) is for one scan, one (batch, heads, channels, size) for as many as heads."""
        return [state] if state.ndim == 3 else list(state.unbind(1))

    def selective_scan(  # noqa: PLR0917 (transformers' positions)
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **_implementation: Any,
    ) -> Any:
        """Takes and returns what transformers' function does, and starts at the state that was read."""
        if delta_bias is not None:
            dt = dt + delta_bias.to(dt.dtype)[..., None]
        if delta_softplus:
            dt = F.softplus(dt)
        states = getattr(self._local, "states", [])
        batch, channels, _ = hidden_states.shape
        blank = hidden_states.new_zeros(batch, channels, A.shape[-1])
        first = states.pop(0) if states else blank
        last, output = _scanned(hidden_states, dt, A, B, C, first)
        if D is not None:
            output = output + hidden_states * D[None, :, None]
        if z is not None:
            output = output * F.silu(z)
        return (output, last) if return_last_state else output


def _scanned(
    inputs: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last state (batch, channels, size) and the outputs (batch, channels, tokens), in the type of the inputs."""

    def step(state: torch.Tensor, token: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        value, rate, b, c = token
        state = torch.exp(A * rate[..., None]) * state + (rate * value)[..., None] * b[:, None]
        return state, (state * c[:, None]).sum(-1)

    tokens = tuple(tensor.float().permute(2, 0, 1).contiguous() for tensor in (inputs, dt, B, C))
    last, outputs = scan(step, state.float().contiguous(), tokens)
    return last.to(inputs.dtype), outputs.permute(1, 2, 0).to(inputs.dtype)
