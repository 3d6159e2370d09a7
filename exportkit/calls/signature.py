"""Binds the arguments of a call to the parameters of the observed method, and back. The only place that does.

In come ``args, kwargs`` as the caller wrote them; out comes one dict in signature order, where ``*args`` is a tuple and
``**kwargs`` a dict, each under the parameter's own name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from exportkit.errors import UnknownInputError


@dataclass(frozen=True)
class Signature:
    """Parameters of an observed method, without ``self``.

    Attributes:
        names: Names of all parameters, in order.
        var_positional: Name of ``*args``, if there is one.
        var_keyword: Name of ``**kwargs``, if there is one.
        defaults: Default values by name, of the parameters that have one.
        positional_only: Names of parameters that cannot be given by name.
    """

    names: tuple[str, ...]
    var_positional: str | None
    var_keyword: str | None
    defaults: Mapping[str, Any]
    positional_only: frozenset[str]

    @classmethod
    def of(cls, method: Callable[..., Any]) -> Signature:
        """Returns the signature of a bound method or function."""
        parameters = inspect.signature(method).parameters
        by_kind = {parameter.kind: name for name, parameter in parameters.items()}
        return cls(
            names=tuple(parameters),
            var_positional=by_kind.get(inspect.Parameter.VAR_POSITIONAL),
            var_keyword=by_kind.get(inspect.Parameter.VAR_KEYWORD),
            defaults={n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty},
            positional_only=frozenset(n for n, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_ONLY),
        )

    def plain(self) -> tuple[str, ...]:
        """Returns the names of the parameters that take one value each, so neither ``*args`` nor ``**kwargs``."""
        return tuple(name for name in self.names if name not in (self.var_positional, self.var_keyword))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the given arguments by parameter, in signature order.

        Wrong arguments are bound as far as they go: to refuse them is the method's own business.
        """
        positions = self._positions()
        values = dict(zip(positions, args, strict=False))
        rest = tuple(args[len(positions) :])
        if self.var_positional is not None and rest:
            values[self.var_positional] = rest
        plain = set(self.plain())
        extra = {name: value for name, value in kwargs.items() if name not in plain}
        values |= {name: value for name, value in kwargs.items() if name in plain}
        if self.var_keyword is not None and extra:
            values[self.var_keyword] = extra
        return {name: values[name] for name in self.names if name in values}

    def unbind(
        self, values: Mapping[str, Any], named: Iterable[str] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns ``args, kwargs`` for the given values, the reverse of `bind`.

        Args:
            values: Values by parameter.
            named: Parameters to give by name, by default all. Those before ``*args`` and positional-only ones are
                given by position all the same.
        """
        positions = self._positions()
        rest = tuple(values.get(self.var_positional or "", ()))
        by_name = set(self.names if named is None else named) - self.positional_only
        given = [name for name in positions if name in values and name not in by_name]
        leading = positions[: positions.index(given[-1]) + 1] if given else ()
        if rest:  # none may be left out before these
            leading = positions
        args = (*(values.get(name, self.defaults.get(name)) for name in leading), *rest)
        kwargs = {n: values[n] for n in self.plain() if n in values and n not in leading}
        return args, {**kwargs, **values.get(self.var_keyword or "", {})}

    def name_of(self, key: str | int) -> str:
        """Returns the parameter that a user names by ``key``: its name or its position.

        Raises:
            UnknownInputError: if there is no such parameter.
        """
        if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < len(self.names):
            return self.names[key]
        if key in self.names:
            return str(key)
        raise UnknownInputError(
            f"Unexpected keyword argument {key!r}: the observed method has no such input.",
            expected=f"one of {', '.join(self.names)}, or a position below {len(self.names)}",
            got=repr(key),
            hint="inputs are named as in the method's signature.",
        )

    def _positions(self) -> tuple[str, ...]:
        names = self.names
        stop = names.index(self.var_positional) if self.var_positional is not None else len(names)
        return tuple(name for name in names[:stop] if name != self.var_keyword)
