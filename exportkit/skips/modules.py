"""Takes the root of a suite and gives its modules, read on demand, and what their import statements bind.

Nothing is imported: the source is parsed, and its top-level statements are followed.
"""

from __future__ import annotations

import ast
import os
import warnings
from pathlib import Path
from typing import Any

from exportkit.skips.externals import external_value, installed
from exportkit.skips.interpreter import Interpreter
from exportkit.skips.layout import Layout
from exportkit.skips.values import UNKNOWN, Class, External, Frame, Imported, Skip, Skipped


class Module:
    """One file: its names, what its top-level code skips, and its text."""

    def __init__(self, file: str, source: str, tree: ast.Module) -> None:
        self.file, self.tree, self.lines = file, tree, source.splitlines()
        self.source = source
        self.frame = Frame("module", file)
        self.skip: Skip | None = None
        self.notes: tuple[Skip, ...] = ()
        self.aliases: set[str] | None = None  # names that skips have in it


class Modules(Interpreter):
    """The modules of a suite."""

    def __init__(self, root: Path, layout: Layout) -> None:
        super().__init__()
        self.root, self.layout = root, layout
        self.modules: dict[Path, Module | None] = {}
        self.by_file: dict[str, Module] = {}
        self.by_frame: dict[int, Module] = {}
        self.problems: list[str] = []
        self._inside = root / Path(layout.folder).parts[0] if Path(layout.folder).parts else root
        self._found: dict[tuple[str, int, str], Path | None] = {}
        self._listed: dict[Path, frozenset[str]] = {}
        self._looking_up: set[tuple[str, str | None, int, str]] = set()

    def module(self, path: Path) -> Module | None:
        """Returns the module of a file, read at most once; None if it cannot be read or parsed."""
        if path not in self.modules:
            self.modules[path] = None  # a circular import finds nothing yet
            file = path.relative_to(self.root).as_posix()
            try:
                source = path.read_text(encoding="utf-8")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", SyntaxWarning)
                    tree = ast.parse(source)
            except (OSError, SyntaxError, ValueError) as error:
                self.problems.append(f"{file}: {type(error).__name__}: {error}")
                return None
            module = self.modules[path] = self.by_file[file] = Module(file, source, tree)
            self.by_frame[id(module.frame)] = module
            self._execute_module(module)
        return self.modules[path]

    def forget(self) -> None:
        """Lets go of all that was read: it hangs together in circles, which are slow to find as garbage."""
        for module in filter(None, self.modules.values()):
            _empty(module.frame)
        vars(self).clear()

    def _execute_module(self, module: Module) -> None:
        outside, self.notes = self.notes, []
        conditions, self._conditions = self._conditions, []
        for statement in module.tree.body:
            try:
                self.execute([statement], module.frame)
            except Skipped as skipped:  # the rest is still read: its tests are those that do not run
                module.skip = module.skip or skipped.skip
            except RecursionError:
                self.problems.append(f"{module.file}, line {statement.lineno}: too deeply nested")
        module.notes, self.notes, self._conditions = tuple(self.notes), outside, conditions

    def read_what_may_skip(self) -> None:
        """Reads the modules that those read so far import, where their text has anything to do with skipping."""
        done: set[Path] = set()
        while waiting := [path for path in self.modules if path not in done]:
            done.update(waiting)
            for module in filter(None, (self.modules[path] for path in waiting)):
                for value in list(module.frame.names.values()) + module.frame.names.get("*", []):
                    path = self._module_of(value) if isinstance(value, Imported) else None
                    if (
                        path is not None
                        and path not in self.modules
                        and "skip" in path.read_text(errors="replace").lower()
                    ):
                        self.module(path)

    def _module_of(self, imported: Imported) -> Path | None:
        submodule = f"{imported.module}.{imported.name}".lstrip(".") if imported.name not in (None, "*") else None
        found = self.find_module(submodule, imported.level, imported.file) if submodule else None
        return found or self.find_module(imported.module, imported.level, imported.file)

    def find_module(self, name: str, level: int, file: str) -> Path | None:
        """Returns the file of a module that is part of the suite, as an import in ``file`` would find it."""
        key = (name, level, file.rpartition("/")[0])
        if key not in self._found:
            self._found[key] = self._find_module(name, level, file)
        return self._found[key]

    def _find_module(self, name: str, level: int, file: str) -> Path | None:
        here = (self.root / file).parent
        parts = name.split(".") if name else []
        if level:
            folders = [here.parents[level - 2] if level > 1 else here]
        elif installed(name) and not any(parts[0] in self._names_in(folder) for folder in (self.root, here)):
            return None
        else:
            folders = [here, *(folder for folder in here.parents if folder.is_relative_to(self.root))]
        for folder in folders:
            if parts and not {parts[0], f"{parts[0]}.py"} & self._names_in(folder):
                continue
            path = folder.joinpath(*parts)
            for candidate in (path.with_suffix(".py") if parts else path / "__init__.py", path / "__init__.py"):
                if candidate.is_relative_to(self._inside) and candidate.is_file():
                    return candidate
        return None

    def _names_in(self, folder: Path) -> frozenset[str]:
        """The names of all that is in a folder, looked up once: most imports are of something else."""
        if folder not in self._listed:
            try:
                self._listed[folder] = frozenset(os.listdir(folder))
            except OSError:
                self._listed[folder] = frozenset()
        return self._listed[folder]

    def is_importable(self, module: str) -> bool:
        """Whether a module is installed, or below the root."""
        top = module.partition(".")[0]
        return super().is_importable(module) or any(
            (folder / top).is_dir() or (folder / f"{top}.py").is_file() for folder in (self.root, self.root / "src")
        )

    def look_up(self, imported: Imported) -> Any:
        """Returns what an import statement bound: something of the suite, or the full name of something else."""
        key = (imported.module, imported.name, imported.level, imported.file)
        if key in self._looking_up:  # modules that import a name from each other
            return UNKNOWN
        self._looking_up.add(key)
        try:
            return self._look_up(imported)
        finally:
            self._looking_up.discard(key)

    def _look_up(self, imported: Imported) -> Any:
        path = self.find_module(imported.module, imported.level, imported.file)
        if imported.name is None:
            module = self.module(path) if path is not None else None
            return module.frame if module is not None else External(imported.module)
        if path is not None:
            module = self.module(path)
            value = self.member_of(module, imported.name) if module is not None else UNKNOWN
            if value is not UNKNOWN:
                return value
        submodule = self.find_module(f"{imported.module}.{imported.name}".lstrip("."), imported.level, imported.file)
        if submodule is not None and submodule != path:
            module = self.module(submodule)
            return module.frame if module is not None else UNKNOWN
        inside = path is not None or imported.level > 0
        return UNKNOWN if inside else external_value(f"{imported.module}.{imported.name}")

    def member_of(self, module: Module, name: str) -> Any:
        """Returns what a name of a module means, or UNKNOWN."""
        return (
            self._Name(ast.Name(name, ast.Load()), module.frame)
            if name in module.frame.names
            else self.missing_name(name, module.frame)
        )

    def missing_name(self, name: str, frame: Frame) -> Any:
        """Returns what a star import brought under a name, or UNKNOWN."""
        while frame.parent is not None:
            frame = frame.parent
        key = ("*", name, 0, frame.file)
        if key in self._looking_up:  # modules that import all of each other
            return UNKNOWN
        self._looking_up.add(key)
        try:
            return self._from_stars(name, frame)
        finally:
            self._looking_up.discard(key)

    def _from_stars(self, name: str, frame: Frame) -> Any:
        for star in frame.names.get("*", ()):
            path = self.find_module(star.module, star.level, star.file)
            module = self.module(path) if path is not None else None
            value = UNKNOWN if module is None or name.startswith("_") else self.member_of(module, name)
            if value is not UNKNOWN:
                return value
        return UNKNOWN


def _empty(frame: Frame) -> None:
    held = list(frame.names.values())
    frame.names.clear()
    frame.owner = None
    for value in held:
        if isinstance(value, Class):
            value.bases, value.cached_order, value.cached_marks = (), None, None
            _empty(value.body)
