"""Operators that draw random numbers: made of uniform and normal ones, which are fixed where results are compared.

A graph and its model can only be compared if both get the same random numbers. `fixed_numbers` gives them to operators
of torch, and `exportkit.running.random_numbers` to an ONNX graph: every draw of a shape in a call is the same, so the
order of draws does not matter. Other distributions are computed from these numbers in the same way on both sides, by
`RANDOM_OPERATORS`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from exportkit._torch_compat.tracing import dispatch_mode, random_states

aten = torch.ops.aten

# The number of element i is (a i + b i^2 + c) mod 2^24: with an odd a and an even b, all of them differ (R. Rivest,
# Permutation polynomials modulo 2^w, 2001), and each is exact in float32.
LINEAR, SQUARE, CONSTANT, BITS = 10_368_889, 6_364_136, 7_297_353, 24
STEP = 1_234_577  # by which each seed shifts the numbers
QUANTILE_BITS = 16  # by which a normal number is looked up
_COUNT = 1 << BITS
_BITS = {torch.float16: 11, torch.bfloat16: 8}  # of a number below 1, and the step between numbers
_alike: ContextVar[bool] = ContextVar("alike", default=False)
_UNUSUAL_SEED = 0x5DEECE66D  # of torch's generator while numbers are fixed
_MOST_DRAWS = 1_000  # of one call; a model that draws until a number fits would never end with fixed ones


def uniform_bits(dtype: torch.dtype) -> int:
    """Returns how many bits the uniform numbers of a dtype have."""
    return _BITS.get(dtype, BITS)


@functools.cache
def normal_quantiles() -> torch.Tensor:
    """Returns the quantiles of the normal distribution that fixed normal numbers are taken from, in float32."""
    count = 1 << QUANTILE_BITS
    quantiles: torch.Tensor = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    return quantiles.to(torch.float32)


@contextlib.contextmanager
def rows_alike() -> Iterator[None]:
    """Lets every row of fixed numbers be the same, for the time of a ``with`` block: is an axis the batch?"""
    token = _alike.set(True)
    try:
        yield
    finally:
        _alike.reset(token)


def _bits(shape: Sequence[int], device: Any, seed: int) -> torch.Tensor:
    index = torch.arange(math.prod(shape), device=device)
    if _alike.get() and len(shape) > 1:
        index = index % max(math.prod(shape[1:]), 1)
    index = (index + seed * STEP) % _COUNT
    return (((index * SQUARE + LINEAR) % _COUNT * index + CONSTANT) % _COUNT).reshape(shape)


def fixed_uniform(shape: Sequence[int], dtype: torch.dtype, device: Any, seed: int) -> torch.Tensor:
    """Returns numbers from 0 to 1, without 1, that depend on the shape and the seed alone."""
    bits = uniform_bits(dtype)
    return (_bits(shape, device, seed) >> (BITS - bits)).to(dtype) / (1 << bits)


def fixed_normal(shape: Sequence[int], dtype: torch.dtype, device: Any, seed: int) -> torch.Tensor:
    """Returns normal numbers that depend on the shape and the seed alone."""
    return normal_quantiles().to(device)[_bits(shape, device, seed) >> (BITS - QUANTILE_BITS)].to(dtype)


# Distributions, in terms of uniform and normal numbers. Arguments that do not matter, such as generators, are ignored.


def _float(x: torch.Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.float32


def _rand(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x, dtype=_float(x))


def _normal(x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
    return torch.randn_like(x) * std + mean


def _normal_around(mean: float | torch.Tensor, std: Any = 1.0, **_: Any) -> torch.Tensor:
    like = mean + std * torch.zeros_like(mean) if isinstance(mean, torch.Tensor) else std
    numbers: torch.Tensor = torch.randn_like(like) * std + mean
    return numbers


def _normal_of_size(mean: float, std: float, size: Sequence[int], **options: Any) -> torch.Tensor:
    return torch.randn(size, **_plain(options)) * std + mean


def _uniform(x: torch.Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> torch.Tensor:
    return torch.rand_like(x) * (high - low) + low


def _bernoulli(probability: torch.Tensor, **_: Any) -> torch.Tensor:
    return (torch.rand_like(probability) < probability).to(probability.dtype)


def _bernoulli_like(x: torch.Tensor, probability: float | torch.Tensor = 0.5, **_: Any) -> torch.Tensor:
    return (_rand(x) < probability).to(x.dtype)


def _exponential(x: torch.Tensor, rate: float = 1.0, **_: Any) -> torch.Tensor:
    # as in torch, not 0: code takes the logarithm of it, and divides by it
    return (-torch.log1p(-_rand(x))).clamp(min=torch.finfo(_float(x)).eps / 2) / rate


def _cauchy(x: torch.Tensor, median: float = 0.0, sigma: float = 1.0, **_: Any) -> torch.Tensor:
    return torch.tan((_rand(x) - 0.5) * math.pi) * sigma + median


def _log_normal(x: torch.Tensor, mean: float = 1.0, std: float = 2.0, **_: Any) -> torch.Tensor:
    return _normal(x, mean, std).exp()


def _geometric(x: torch.Tensor, probability: float, **_: Any) -> torch.Tensor:
    return (_exponential(x) / -math.log1p(-probability)).ceil().to(x.dtype)


def _whole(numbers: torch.Tensor, low: Any, high: Any, dtype: torch.dtype | None) -> torch.Tensor:
    whole: torch.Tensor = (numbers * (high - low)).floor().to(torch.int64 if dtype is None else dtype) + low
    return whole


def _randint(high: Any, size: Sequence[int], *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    return _randint_from(0, high, size, dtype=dtype, **options)


def _randint_from(
    low: Any, high: Any, size: Sequence[int], *, dtype: torch.dtype | None = None, **options: Any
) -> torch.Tensor:
    return _whole(torch.rand(size, dtype=torch.float32, **_plain(options)), low, high, dtype)


def _randint_like(x: torch.Tensor, high: Any, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return _randint_like_from(x, 0, high, dtype=dtype)


def _randint_like_from(
    x: torch.Tensor, low: Any, high: Any, *, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    return _whole(torch.rand_like(x, dtype=torch.float32), low, high, dtype or x.dtype)


def _random_to(x: torch.Tensor, high: int, **_: Any) -> torch.Tensor:
    return _randint_like_from(x, 0, high)


def _randperm(count: Any, *, dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    return (
        torch.rand(count, dtype=torch.float32, **_plain(options)).argsort().to(torch.int64 if dtype is None else dtype)
    )


def _multinomial(probabilities: torch.Tensor, count: int, replacement: bool = False, **_: Any) -> torch.Tensor:
    """As torch draws without replacement: the largest quotients of the probabilities and exponential numbers."""
    if count == 1:
        return (probabilities / _exponential(probabilities)).argmax(-1, keepdim=True)
    if not replacement:
        return (probabilities / _exponential(probabilities)).topk(count).indices
    sums = probabilities.cumsum(-1)
    places = torch.rand((*probabilities.shape[:-1], count), dtype=probabilities.dtype, device=probabilities.device)
    return (places[..., :, None] * sums[..., None, -1:] >= sums[..., None, :]).sum(-1)


def _dropout(x: torch.Tensor, probability: float, training: bool | None = True) -> tuple[torch.Tensor, torch.Tensor]:
    if not training or probability == 0:
        return x, torch.ones_like(x, dtype=torch.bool)
    kept = torch.rand_like(x) < 1 - probability
    return x * (kept.to(x.dtype) / (1 - probability) if probability < 1 else torch.zeros_like(x)), kept


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in ("dtype", "device") and value is not None}


RANDOM_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli_like,
    aten.bernoulli.p: _bernoulli_like,
    aten.cauchy.default: _cauchy,
    aten.exponential.default: _exponential,
    aten.geometric.default: _geometric,
    aten.log_normal.default: _log_normal,
    aten.multinomial.default: _multinomial,
    aten.native_dropout.default: _dropout,
    aten.normal.Tensor_Tensor: _normal_around,
    aten.normal.Tensor_float: _normal_around,
    aten.normal.float_Tensor: _normal_around,
    aten.normal.float_float: _normal_of_size,
    aten.normal_functional.default: _normal,
    aten.randint.default: _randint,
    aten.randint.low: _randint_from,
    aten.randint_like.default: _randint_like,
    aten.randint_like.low_dtype: _randint_like_from,
    aten.random.to: _random_to,
    aten.randperm.default: _randperm,
    aten.uniform.default: _uniform,
}
"""Distributions by their operator, in terms of `torch.rand`, `torch.randn` and what these are for a tensor."""

DROPOUT = {
    aten.alpha_dropout.default: aten.bernoulli.p,
    aten.dropout.default: aten.native_dropout.default,
    aten.feature_alpha_dropout.default: aten.bernoulli.p,
    aten.feature_dropout.default: aten.bernoulli.p,
}
"""What operators that torch decomposes itself draw from."""

_IN_PLACE = {
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.cauchy_.default: aten.cauchy.default,
    aten.exponential_.default: aten.exponential.default,
    aten.geometric_.default: aten.geometric.default,
    aten.log_normal_.default: aten.log_normal.default,
    aten.normal_.default: aten.normal_functional.default,
    aten.random_.to: aten.random.to,
    aten.uniform_.default: aten.uniform.default,
}
_WITH_GENERATOR = {
    aten.randint.generator: aten.randint.default,
    aten.randint.low_generator: aten.randint.low,
    aten.randperm.generator: aten.randperm.default,
}
_PLAIN = {aten.rand: fixed_uniform, aten.randn: fixed_normal}
_LIKE = {aten.rand_like: fixed_uniform, aten.randn_like: fixed_normal}


class _FixedNumbers:
    """What is done with each operator; see `dispatch_mode`."""

    supports_higher_order_operators = True  # the bodies of loops and branches
    seed: int
    left: int
    generators: Collection[int]
    states: list[bytes]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns what an operator returns, with fixed numbers in place of random ones."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*map(self._inside, args), **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags or not self._are_random(args, kwargs):
            return func(*args, **kwargs)
        packet, is_real = func.overloadpacket, (kwargs.get("dtype") or torch.float32).is_floating_point
        if packet in _PLAIN and is_real:
            self.left -= 1
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            return _PLAIN[packet](args[0], dtype, kwargs.get("device"), self.seed)
        if packet in _LIKE and is_real:
            self.left -= 1
            like = args[0]
            dtype, device = kwargs.get("dtype") or like.dtype, kwargs.get("device") or like.device
            return _LIKE[packet](like.shape, dtype, device, self.seed)
        target = _IN_PLACE.get(func, _WITH_GENERATOR.get(func, func))
        if target in RANDOM_OPERATORS:
            given = {name: value for name, value in kwargs.items() if name != "generator"}
            with self:  # type: ignore[attr-defined]  # the class that `dispatch_mode` makes is a context manager
                made = RANDOM_OPERATORS[target](*_without_generators(args), **given)
            return args[0].copy_(made) if func in _IN_PLACE else made
        return func(*args, **kwargs)

    def _are_random(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether numbers to be drawn are random, and not those of a generator that the model has or seeds itself."""
        for value in (*args, *kwargs.values()):  # operators get generators as new objects
            if isinstance(value, torch.Generator) and _identity(value) not in self.generators:
                return False
        if self.left <= 0 or random_states() != self.states:
            self.left = 0
        return self.left > 0

    def _inside(self, value: Any) -> Any:
        """A function that runs in this mode, in which the operator that calls it does not."""

        def inside(*args: Any) -> Any:
            with self:  # type: ignore[attr-defined]
                return value(*args)

        return inside if callable(value) and not isinstance(value, torch.Tensor) else value


def _identity(generator: torch.Generator) -> int:
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


def _without_generators(args: Sequence[Any]) -> list[Any]:
    return [value for value in args if not isinstance(value, torch.Generator)]


@contextlib.contextmanager
def fixed_numbers(seed: int | None, generators: Collection[torch.Generator] = ()) -> Iterator[None]:
    """Gives operators the same numbers, for each shape, in place of random ones, for the time of a ``with`` block.

    torch's own generator is afterwards as it was before. Seen in torch 2.13.

    Args:
        seed: Which numbers; None to change nothing.
        generators: Those from which random numbers may come, besides torch's own.
    """
    if seed is None:
        yield
        return
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(_UNUSUAL_SEED)  # a model that seeds itself changes this state
    known, states = set(map(_identity, generators)), random_states()
    try:
        with dispatch_mode(_FixedNumbers, seed=seed, left=_MOST_DRAWS, generators=known, states=states):
            yield
    finally:
        torch.default_generator.set_state(before)
