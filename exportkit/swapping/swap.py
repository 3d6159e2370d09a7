"""Puts registered replacements in force: in one model, in the Python modules that define classes, in declarations."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from exportkit._torch_compat.transformers import RECORDABLE_OUTPUTS, recordable_outputs
from exportkit.errors import InvalidRequestError, PatchError, require_module
from exportkit.overrides import (
    Attribute,
    ChildOf,
    ClassOf,
    Slot,
    is_replaced,
    modules_as_they_were,
    original_attribute,
    original_class,
    original_in,
    replace,
    replaced,
)
from exportkit.rewrites.table import applied
from exportkit.swapping.mapping import (
    Entry,
    built_in_rewrites,
    entries,
    entry_for,
    is_rebuilt,
    qualified_name,
    rebuilt,
    require_same_forward,
)


@dataclass(frozen=True)
class Swap:
    """One replacement in force.

    Attributes:
        where: Path of the module in the model, or the dotted name that refers to the class.
        original: The class as it was.
        replacement: The class in its place.
        key: The key of the registry that matched.
        how: "class" if the class of a live module was replaced, "rebuilt" if it was rebuilt by the replacement's
            ``from_module``, "name" if a name in a Python module was given the replacement.
    """

    where: str
    original: type
    replacement: type
    key: str
    how: str

    def __str__(self) -> str:
        return f"{self.where}: {qualified_name(self.original)} -> {qualified_name(self.replacement)} ({self.how})"


@dataclass(frozen=True)
class AppliedPatches:
    """What was swapped where.

    Attributes:
        swaps: The replacements in force.
        unused: Keys of the registry that matched nothing.
        built_in: Names of exportkit's own rewrites that are in force.
    """

    swaps: tuple[Swap, ...]
    unused: tuple[str, ...]
    built_in: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.swaps)

    def __str__(self) -> str:
        in_force = [*map(str, self.swaps), *(f"built-in: {name}" for name in self.built_in)]
        return "\n".join([*(in_force or ["nothing was swapped"]), *(f"unused: {key}" for key in self.unused)])


@contextlib.contextmanager
def apply_patches(model: torch.nn.Module | None = None, built_in: Iterable[str] = ()) -> Iterator[AppliedPatches]:
    """Puts the registered replacements in force for the time of a ``with`` block, and reports what was swapped where.

    With a model, its live modules become instances of the replacements and keep their weights and attributes; the
    ``__init__`` of the replacement does not run. If a replacement has a classmethod ``from_module(original)``, the
    module that it returns takes the place of the original, and shares its tensors of the same name and shape. Without a
    model, classes are replaced wherever a loaded Python module refers to them, for models that are built in the block.

    Blocks may be nested, overlap in threads, and be left in any order.

    Args:
        model: The model whose modules to swap.
        built_in: Names of exportkit's own rewrites to put in force as well, see `get_patch_mapping`. This is for models
            that are traced without `exportkit.export`, which chooses its rewrites itself.

    Raises:
        PatchError: if a replacement cannot stand in for its original; nothing has been changed then.
        InvalidTypeError: if the model is not a module.
        InvalidRequestError: if a rewrite does not exist, or is given without a model.

    Example:
        >>> class Doubled(torch.nn.Linear):
        ...     def forward(self, input):
        ...         return 2 * super().forward(input)
        >>> register_patch_mapping({"torch.nn.modules.linear.Linear": Doubled})
        >>> with apply_patches(torch.nn.Sequential(torch.nn.Linear(4, 2))) as applied:
        ...     print([swap.where for swap in applied.swaps])
        ['0']
        >>> clear_patch_mapping()
    """
    if model is not None:
        require_module(model, "patched")
    rewrites = built_in_rewrites(built_in)
    if rewrites and model is None:
        raise InvalidRequestError("A built-in rewrite needs the model that it is for.", expected="apply_patches(model)")
    registered = entries()
    names = tuple(rewrite.name for rewrite in rewrites)
    if not registered and model is None:
        yield AppliedPatches((), ())
    elif model is None:
        with _in_python_modules(registered) as swaps:
            yield _report(swaps, registered, ())
    else:
        slots, swaps = _in_model(model, registered) if registered else ([], [])
        with replaced(slots), applied(rewrites, model):
            yield _report(swaps, registered, names)


def _report(swaps: Sequence[Swap], registered: Sequence[Entry], built_in: tuple[str, ...]) -> AppliedPatches:
    used = {swap.key for swap in swaps}
    return AppliedPatches(tuple(swaps), tuple(entry.text for entry in registered if entry.text not in used), built_in)


def _in_model(model: torch.nn.Module, registered: Sequence[Entry]) -> tuple[list[tuple[Slot, Any]], list[Swap]]:
    """The slots with their new values, and what will be swapped; nothing is changed yet."""
    slots: list[tuple[Slot, Any]] = []
    swaps = []
    chosen: dict[type, Entry | None] = {}
    for path, _, module in modules_as_they_were(model):
        original = original_class(module)
        if original not in chosen:
            chosen[original] = entry = entry_for(registered, original)
            if entry is not None:
                require_same_forward(original, entry.replacement)
        entry = chosen[original]
        if entry is None:
            continue
        if "forward" in vars(module):
            raise PatchError(
                f"{path or 'the model'} cannot be swapped: its own `forward` hides the `forward` of its class.",
                hint="leave the context that replaced it first.",
            )
        how = "rebuilt" if is_rebuilt(entry.replacement) else "class"
        slots += _rebuilt(model, module, entry) if how == "rebuilt" else [(ClassOf(module), entry.replacement)]
        swaps.append(Swap(path, original, entry.replacement, entry.text, how))
    return slots, swaps


def _rebuilt(model: torch.nn.Module, module: torch.nn.Module, entry: Entry) -> list[tuple[Slot, torch.nn.Module]]:
    """A new module for every place that holds the original one."""
    paths = [path.rpartition(".") for path, _ in model.named_modules(remove_duplicate=False) if path]
    slots = dict.fromkeys(ChildOf(model.get_submodule(parent), name) for parent, _, name in paths)
    places = [slot for slot in slots if original_in(slot) is module]
    if not places:
        raise PatchError(
            f"{qualified_name(type(module))} cannot be rebuilt: it is the model itself, and no module contains it.",
            hint="apply the patches to a module that has it as a child.",
        )
    now = places[0].read()
    if now is not module and type(now) is entry.replacement:  # another block has already rebuilt it
        return [(place, now) for place in places]
    new = rebuilt(module, entry.replacement)
    return [(place, new) for place in places]


@contextlib.contextmanager
def _in_python_modules(registered: Sequence[Entry]) -> Iterator[list[Swap]]:
    found = _names_to_replace(registered)
    swaps = [
        Swap(f"{module.__name__}.{name}", original, entry.replacement, entry.text, "name")
        for module, name, original, entry in found
    ]
    for swap in swaps:
        if swap.key == qualified_name(swap.original):  # other keys may stand for classes that are never used
            require_same_forward(swap.original, swap.replacement, abstract=True)
    with contextlib.ExitStack() as stack:
        if found:
            replacements = {entry.replacement for entry in registered}
            before = {(module.__name__, name) for module, name, value in _module_classes() if value in replacements}
            stack.callback(_put_back_copies, found, before)
        stack.enter_context(
            replaced([(Attribute(module, name), entry.replacement) for module, name, _, entry in found])
        )
        yield swaps


def _names_to_replace(registered: Sequence[Entry]) -> list[tuple[ModuleType, str, type, Entry]]:
    found = []
    chosen: dict[tuple[str, type], Entry | None] = {}
    for module, name, _ in _module_classes():
        original = original_attribute(module, name)
        if (name, original) not in chosen:
            chosen[name, original] = entry_for(registered, original, name)
        entry = chosen[name, original]
        if entry is not None:
            found.append((module, name, original, entry))
    return found


def _module_classes() -> Iterator[tuple[ModuleType, str, type]]:
    """Yields each name in a loaded Python module that currently stands for a module class."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                # type(value): isinstance would load lazy objects that stand for a class
                if issubclass(type(value), type) and torch.nn.Module in value.__mro__:
                    yield module, name, value


def _put_back_copies(found: Sequence[tuple[ModuleType, str, type, Entry]], before: set[tuple[str, str]]) -> None:
    """Restores the class in names that took a replacement while it was in force (an import, a lazy module).

    Names that stood for a replacement ``before`` are left alone.
    """
    originals = {(name, entry.replacement): original for _, name, original, entry in found}
    for module, name, value in _module_classes():
        original = originals.get((name, value))
        if original is not None and (module.__name__, name) not in before and not is_replaced(module, name):
            setattr(module, name, original)


class PatchedRecorders(contextlib.AbstractContextManager["PatchedRecorders"]):
    """Changed declarations of a model; `undo`, or leaving a ``with`` block, restores them."""

    def __init__(self, undo: contextlib.ExitStack) -> None:
        self._stack = undo

    def undo(self) -> None:
        """Restores the declarations; overlapping changes may be undone in any order."""
        self._stack.close()

    def __exit__(self, *_error: object) -> None:
        self.undo()


def patch_output_recorders(model: torch.nn.Module) -> PatchedRecorders:
    """Makes the model's ``_can_record_outputs`` name registered replacements, and returns an object that undoes this.

    Only this model changes. Its class, and other models of that class, keep their declarations.

    Args:
        model: The model, whose modules may declare the outputs that can be captured.

    Example:
        >>> class Quiet(torch.nn.Linear):
        ...     pass
        >>> class Model(torch.nn.Sequential):
        ...     _can_record_outputs = {"hidden_states": torch.nn.Linear}
        >>> register_patch_mapping({"Linear": Quiet})
        >>> model = Model(Quiet(2, 2))
        >>> with patch_output_recorders(model):
        ...     print(model._can_record_outputs["hidden_states"].__name__)
        Quiet
        >>> clear_patch_mapping()
    """
    registered = entries()
    changes = []
    for module in model.modules() if registered else ():
        declared = recordable_outputs(module)
        if declared:
            changed = {key: _patched(spec, registered) for key, spec in declared.items()}
            changes.append((Attribute(module, RECORDABLE_OUTPUTS), changed))
    return PatchedRecorders(replace(changes))


def _patched(spec: Any, registered: Sequence[Entry]) -> Any:
    if isinstance(spec, list | tuple):
        return [_patched(one, registered) for one in spec]
    if isinstance(spec, str | type):
        entry = _entry_for(spec, registered)
        return spec if entry is None else entry.replacement
    if not hasattr(spec, "target_class"):
        return spec
    entry = _entry_for(spec.target_class or spec.class_name, registered)
    return spec if entry is None else dataclasses.replace(spec, target_class=entry.replacement)


def _entry_for(target: Any, registered: Sequence[Entry]) -> Entry | None:
    if isinstance(target, type):
        return entry_for(registered, target)
    return next((entry for entry in registered if target and entry.means(target, target)), None)
