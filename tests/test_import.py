"""Qualities of the package as a whole: what importing it costs, what it offers, and which way its parts depend."""

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import exportkit

ROOT = Path(exportkit.__file__).parent

# Each stage may import those before it; axes is the reasoning alone. What stands beside the line knows nothing of it.
STAGES = ["errors", "_torch_compat", "trees", "patching", "capture", "tracing", "observe", "axes"]
STAGES += ["arguments", "export", "verify"]
# Doors to later stages: what a user calls on an early value and what is imported when it is called.
DOORS = {"observe/observer.py", "export/onnx_model.py"}
# Beside the line, on top of it: they may import all of it, and nothing of it imports them.
BESIDE = ["scenarios", "skips", "cli"]

PRIVATE = re.compile(r"(torch|transformers|onnx|onnxscript)\.(\w+\.)*_[a-z]")
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))


def _stage(file):
    """The stage, or what else the package has at its top level, that a file or module belongs to."""
    return file.replace(".", "/").removesuffix("/py").split("/")[0]


def _imports(file):
    """Yields (module, whether it is imported with the file) for each import in it, less those for types only."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))

    def visit(node, at_once):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, at_once) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{file} has a relative import"
                if child.module == "exportkit":
                    yield from ((f"exportkit.{alias.name}", at_once) for alias in child.names)
                else:
                    yield child.module, at_once
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from visit(child, at_once and not inside)

    yield from visit(tree, True)


def _own_imports(file, at_once):
    """The other parts of the package that a file imports, with the file or when a function of it is called."""
    own = {
        module.removeprefix("exportkit.") for module, now in _imports(file) if now is at_once if "exportkit." in module
    }
    return {_stage(module) for module in own} - {_stage(file)}


def _before(file):
    return set(STAGES[: STAGES.index(_stage(file))])


STAGE_FILES = [file for file in FILES if _stage(file) in STAGES]


def test_every_part_has_its_place():
    assert {_stage(file) for file in FILES} == {*STAGES, *BESIDE, "__init__"}


def test_stages_import_only_stages_before_them():
    wrong = {file: _own_imports(file, at_once=True) - _before(file) for file in STAGE_FILES}

    assert {file: names for file, names in wrong.items() if names} == {}


def test_only_doors_open_to_later_stages():
    later = {file: _own_imports(file, at_once=False) - _before(file) for file in STAGE_FILES}

    assert {file for file, names in later.items() if names} == DOORS
    assert not set.union(*later.values()) & set(BESIDE)


def test_reasoning_imports_nothing_but_the_standard_library():
    files = [file for file in FILES if _stage(file) == "axes"]
    modules = {module for file in files for module, _ in _imports(file)}
    own = {_stage(module.removeprefix("exportkit.")) for module in modules if module.startswith("exportkit.")}

    assert {module.split(".")[0] for module in modules} - sys.stdlib_module_names <= {"exportkit"}
    assert own <= {"axes", "errors"}


def test_private_names_of_torch_are_used_in_one_file_only():
    for file in FILES:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        names = {module for module, _ in _imports(file)}
        names |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        private = {name for name in names if PRIVATE.match(name)}
        assert not private or file == "_torch_compat.py", (file, private)


def test_every_file_says_what_it_is_for():
    for file in FILES:
        assert ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))), file


def test_nothing_slow_is_imported_before_it_is_needed():
    code = """
import sys, torch, exportkit
print(*sys.modules)
model, observer = torch.nn.Linear(4, 2), exportkit.InputObserver()
with observer(model):
    model(torch.ones(3, 4))
observer.plan(), observer.infer_dynamic_shapes(), observer.infer_arguments(exportable=True)
print(*sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after_import, after_planning = (set(line.split()) for line in result.stdout.splitlines())
    slow = {"transformers", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "rich", "typer"}

    assert "torch" in after_import
    assert not after_import & slow
    assert not after_planning & slow


def test_every_module_can_be_imported():
    names = [module.name for module in pkgutil.walk_packages([str(ROOT)], "exportkit.")]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code, *reversed(names)], capture_output=True, text=True, check=True)

    assert len(names) > 20


def test_public_names_are_these():
    assert sorted(exportkit.__all__) == [
        "Arguments",
        "Call",
        "Exported",
        "ExportkitError",
        "Expression",
        "InputObserver",
        "Observation",
        "OnnxModel",
        "OutputRecorder",
        "Plan",
        "Report",
        "Trace",
        "apply_patches",
        "capture",
        "capture_outputs",
        "check_patch",
        "clear_patch_mapping",
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
        "string_type",
        "trace_model",
        "unregister_patch_mapping",
    ]


def test_no_other_name_leaks():
    stages = {module.name for module in pkgutil.iter_modules([str(ROOT)])}

    assert {name for name in vars(exportkit) if not name.startswith("__")} - stages <= set(exportkit.__all__)


def test_public_names_are_documented():
    assert [name for name in exportkit.__all__ if not getattr(exportkit, name).__doc__] == []
