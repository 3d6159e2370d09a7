"""Every private name of torch, transformers and onnxscript that exportkit uses, by topic.

No other package uses a private name. Each function says in which version it was seen. If a name no longer exists, it
raises CompatibilityError, so that an upgrade fails with an explanation and not with an AttributeError.
"""

from __future__ import annotations

import sys
from typing import Any

from exportkit.errors import CompatibilityError


def require(owner: Any, name: str, seen: str = "torch 2.13") -> Any:
    """Returns ``owner.name``.

    Args:
        owner: A module or another object.
        name: Name of its attribute.
        seen: The library and the version in which the attribute was seen.

    Raises:
        CompatibilityError: if there is no such attribute.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        library = seen.partition(" ")[0]
        raise CompatibilityError(
            f"{getattr(owner, '__name__', type(owner).__name__)}.{name} does not exist in this version of {library}.",
            expected=f"present, as in {seen}",
            got=f"{library} {getattr(sys.modules.get(library), '__version__', 'of an unknown version')}",
            hint=f"install a version of {library} that exportkit was tested with, or report this.",
        ) from None
