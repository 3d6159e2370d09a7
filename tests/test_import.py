"""Qualities of the package as a whole: what importing it costs, what it offers, and which way its imports go."""

import ast
import graphlib
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import exportkit
from exportkit.errors import ExportkitError

ROOT = Path(exportkit.__file__).parent

# In the order of the data flow: a room imports only rooms that stand before it, wherever the import statement stands.
ROOMS = [
    "errors",
    "json_data",
    "files",
    "skipscan",
    "_callable_module",
    "_torch_compat",
    "overrides",
    "trees",
    "plan",
    "calls",
    "rewrites",
    "module_outputs",
    "arguments",
    "running",
    "swapping",
    "module_traces",
    "probing",
    "programs",
    "onnx_files",
    "proof",
    "divergence",
    "folder",
    "peers",
    "report",
    "api",
    "export",
    "capture",
    "__init__",
    "examples",
    "commands",
    "cli",
    "__main__",
]

PRIVATE = re.compile(r"(torch|transformers|onnx|onnxscript)\.(\w+\.)*_[a-z]")
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def _room(module):
    """The folder or file at the top level of the package that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _name(file):
    return ".".join(["exportkit", *file.removesuffix(".py").split("/")]).removesuffix(".__init__")


MODULES = {_name(file): file for file in FILES}


def _imports(file):
    """Every module that a file imports, also inside functions and for types only."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
    return found


def _own_imports(file):
    return {module for module in _imports(file) if module in MODULES and MODULES[module] != file}


def test_every_room_has_its_place():
    assert {_room(module) for module in MODULES} == set(ROOMS)


def test_no_import_goes_upwards():
    upward = {
        (file, imported)
        for module, file in MODULES.items()
        for imported in _own_imports(file)
        if ROOMS.index(_room(imported)) > ROOMS.index(_room(module))
    }

    assert upward == set()


def test_no_files_import_each_other_in_a_circle():
    graph = {module: _own_imports(file) for module, file in MODULES.items()}
    order = graphlib.TopologicalSorter(graph)

    order.prepare()  # raises CycleError, which names the circle


def test_reasoning_imports_nothing_but_the_standard_library():
    modules = {module for file in FILES if _room(_name(file)) == "plan" for module in _imports(file)}

    assert {module.split(".")[0] for module in modules} - sys.stdlib_module_names <= {"exportkit"}
    assert {_room(module) for module in modules & set(MODULES)} <= {"plan", "errors", "json_data"}


def _private(name):
    return name.startswith("_") and not name.startswith("__")


def _own_private_names(tree):
    """The private names that a file defines: classes, functions, methods, and attributes of its own classes."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):  # also annotations in the body of a class
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=slots)):
                names |= {slot.value for slot in slots}
    return names


def _private_uses(tree):
    """Each private attribute that a file uses, with whether on its own instance, and its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=name) if _private(name):
                yield name, isinstance(owner, ast.Name) and owner.id in {"self", "cls"}, node.lineno
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"), args=[_, ast.Constant(value=name), *_]
            ) if _private(str(name)):
                yield name, False, node.lineno
            case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(value=name)) if _private(
                str(name)
            ):
                yield name, False, node.lineno


def test_the_skip_scanner_stands_alone():
    own = {module for module in MODULES if _room(module) == "skipscan"}
    users = {_room(module) for module, file in MODULES.items() if module not in own and _own_imports(file) & own}

    assert {_room(imported) for module in own for imported in _own_imports(MODULES[module])} <= {"skipscan", "errors"}
    assert users <= {"__init__", "commands", "cli"}


def test_private_names_of_torch_are_used_in_one_room_only():
    # What Python documents, under a private name, for named tuples and stack frames.
    documented = {"_exit", "_fields", "_asdict", "_replace", "_make", "_getframe"}
    of_torch = {*dir(torch.Tensor), *dir(torch.nn.Linear(1, 1)), *dir(torch.ops.aten.add.Tensor)}
    trees = {file: ast.parse((ROOT / file).read_text(encoding="utf-8")) for file in FILES}
    own = {file: _own_private_names(tree) for file, tree in trees.items()}
    anywhere = set().union(*own.values())
    for file, tree in trees.items():
        room = _room(_name(file))
        if room == "_torch_compat":
            continue
        names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | _imports(file)
        assert {name for name in names if PRIVATE.match(name)} == set(), file
        in_room = set().union(*(own[other] for other in FILES if _room(_name(other)) == room))
        in_room = own[file] | (in_room - of_torch)
        foreign = {
            (name, line)
            for name, is_own_instance, line in _private_uses(tree)
            if name not in documented | (anywhere if is_own_instance else in_room)
        }
        assert foreign == set(), f"{file} uses private names of other libraries: they belong in _torch_compat"


def test_every_file_says_what_it_is_for():
    for file in FILES:
        assert ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))), file


# Slow to import: none of them before a model is exported, a folder is read, or a table is printed.
SLOW = {
    "jinja2", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "rich", "sympy", "torch._dynamo", "torch._inductor",
    "transformers", "typer",
}  # fmt: skip


def _modules_after(*lines):
    """The modules that are loaded in a new process after each of these lines, less those that torch loads."""
    code = "import sys, torch\nbefore = set(sys.modules)\n"
    code += "".join(f"{line}\nprint(*(set(sys.modules) - before))\n" for line in lines)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in result.stdout.splitlines()]


def test_importing_the_package_imports_none_of_its_rooms():
    (loaded,) = _modules_after("import exportkit")

    assert {name for name in loaded if name.split(".")[0] != "importlib"} == {"exportkit"}


def test_nothing_slow_is_imported_before_it_is_needed():
    loaded = _modules_after(
        "import exportkit; exportkit.InputObserver, exportkit.capture, exportkit.trace_model, exportkit.Plan",
        "model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()\n"
        "with observer(model):\n    model(torch.ones(3, 4))\n"
        "observer.plan(), observer.infer_dynamic_shapes(), observer.infer_arguments(exportable=True)",
    )

    assert [names & SLOW for names in loaded] == [set(), set()]


def test_version_and_help_need_no_torch():
    code = """
import contextlib, sys
from exportkit.cli import app
for option in ("--version", "--help"):
    sys.argv = ["exportkit", option]
    with contextlib.suppress(SystemExit):
        app()
print(*sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *shown, modules = result.stdout.splitlines()

    assert shown[0] == f"exportkit {exportkit.__version__}"
    assert not {*modules.split()} & {"torch", "transformers", "onnx", "numpy"}


@pytest.mark.parametrize("name", ["export", "capture"])
def test_public_functions_that_are_modules_can_be_imported_and_called(name):
    module = importlib.import_module(f"exportkit.{name}")

    assert inspect.ismodule(module)
    assert getattr(exportkit, name) is module
    assert inspect.signature(module) == inspect.signature(getattr(module, name))
    with pytest.raises(ExportkitError):
        module(3, 4).__enter__()


def test_the_stub_says_where_names_come_from():
    stub = ast.parse((ROOT / "__init__.pyi").read_text(encoding="utf-8"))
    imported = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }

    assert imported.keys() == set(exportkit.__all__)
    for name, module in imported.items():
        public = getattr(exportkit, name)
        found = getattr(importlib.import_module(module), name)
        assert found in (public, getattr(public, "__wrapped__", None)), name


def test_every_module_can_be_imported():
    names = sorted(set(MODULES) - {"exportkit"})
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code, *reversed(names)], capture_output=True, text=True, check=True)

    assert len(names) > 20


def test_public_names_are_these():
    assert sorted(exportkit.__all__) == [
        "Call",
        "Exported",
        "ExportkitError",
        "Expression",
        "InputObserver",
        "Observation",
        "OnnxModel",
        "OutputRecorder",
        "Plan",
        "Quantisation",
        "Report",
        "Trace",
        "apply_patches",
        "capture",
        "capture_outputs",
        "check_patch",
        "clear_patch_mapping",
        "compare_runs",
        "export",
        "get_patch_mapping",
        "load",
        "locate_divergence",
        "make_dynamic_cache",
        "make_encoder_decoder_cache",
        "make_static_cache",
        "merge_with_config_defaults",
        "model_addition_debugger_context",
        "patch_output_recorders",
        "register_flattening_functions",
        "register_patch_mapping",
        "scan_skipped_tests",
        "show_progress",
        "string_type",
        "trace_model",
        "unregister_patch_mapping",
    ]


def test_no_other_name_leaks():
    rooms = {module.name for module in pkgutil.iter_modules([str(ROOT)])}

    assert {name for name in dir(exportkit) if not name.startswith("_")} - rooms <= set(exportkit.__all__)


def test_public_names_are_documented():
    assert [name for name in exportkit.__all__ if not getattr(exportkit, name).__doc__] == []
