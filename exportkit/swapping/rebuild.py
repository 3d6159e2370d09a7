"""Modules built from others. In come a module and the class to replace it; out comes a module of that class."""

from __future__ import annotations

import torch

from exportkit.errors import PatchError

FACTORY = "from_module"


def is_rebuilt(replacement: type) -> bool:
    """Returns whether instances of a class are built from the module that they replace."""
    return hasattr(replacement, FACTORY)


def rebuilt(module: torch.nn.Module, replacement: type[torch.nn.Module]) -> torch.nn.Module:
    """Returns what the class builds from a module; weights of the same name and shape are the module's own.

    Raises:
        PatchError: if that is no module.
    """
    new = getattr(replacement, FACTORY)(module)
    if not isinstance(new, torch.nn.Module):
        raise PatchError(f"{replacement.__qualname__}.{FACTORY} did not return a module.", got=type(new).__name__)
    own = {**dict(new.named_parameters()), **dict(new.named_buffers())}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in own and own[name] is not tensor and own[name].shape == tensor.shape:
            path, _, attribute = name.rpartition(".")
            setattr(new.get_submodule(path), attribute, tensor)
    return new.train(module.training)
