"""Lets other compilers take saved programs, and compares with what the models returned.

Takes the directory that ``export_models.py`` wrote, and prints a line for each compiler and program. Runs in a separate
environment, where neither exportkit nor transformers is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import openvino
import torch
from executorch.exir import to_edge
from executorch.runtime import Runtime

Program = torch.export.ExportedProgram
Run = Callable[..., list[torch.Tensor]]


def with_torch(program: Program, _: Path) -> Run:
    return program.module()


def with_aotinductor(program: Program, path: Path) -> Run:
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(path.with_suffix(".pt2")))
    return torch._inductor.aoti_load_package(package)


def with_openvino(program: Program, _: Path) -> Run:
    model = openvino.convert_model(program)
    compiled = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        returned = compiled([tensor.numpy() for tensor in tensors])
        return [torch.from_numpy(returned[position]) for position in range(len(compiled.outputs))]

    return run


def with_executorch(program: Program, path: Path) -> Run:
    path.with_suffix(".pte").write_bytes(to_edge(program).to_executorch().buffer)
    method = Runtime.get().load_program(path.with_suffix(".pte")).load_method("forward")
    return lambda *tensors: method.execute(tensors)


COMPILERS = {
    "torch": with_torch,
    "AOTInductor": with_aotinductor,
    "OpenVINO": with_openvino,
    "ExecuTorch": with_executorch,
}


def check(compiler: str, program: Path, cases: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> bool:
    """Whether a compiled program returns what the model returned, within 1e-4."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        run = COMPILERS[compiler](torch.export.load(program), Path(folder) / program.stem)
        far = max(
            (returned - wanted).abs().max().item()
            for given, expected in cases
            for returned, wanted in zip(run(*given), expected, strict=True)
        )
    print(f"{compiler}, {program.stem}: {len(cases)} calls, largest difference {far:.1e}")
    return far < 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    installed = [name for name in ("exportkit", "transformers") if importlib.util.find_spec(name)]
    if installed:
        sys.exit(f"installed here, which this check is meant to do without: {', '.join(installed)}")
    warnings.simplefilter("ignore", FutureWarning)  # torch's own, for the structure in its files
    compilers = [name for name in COMPILERS if name != "AOTInductor" or shutil.which("g++")]
    results = [
        check(compiler, program, torch.load(program.with_suffix(".pt")))
        for program in sorted(directory.glob("*.pt2"))
        for compiler in compilers
    ]
    sys.exit(0 if results and all(results) else 1)


if __name__ == "__main__":
    main()
