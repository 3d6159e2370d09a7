"""Stage 4, export: one ExportedProgram, and from it an ONNX file that is called like the model."""

from exportkit.export.exported import Exported
from exportkit.export.folder import load_folder
from exportkit.export.make import export
from exportkit.export.onnx_model import OnnxModel
from exportkit.export.onnx_programs import OnnxPrograms
from exportkit.export.programs import ExportedPrograms
from exportkit.export.saved import Case, Saved, check_files, unseen_cases
from exportkit.export.session import Session, require_onnxruntime

__all__ = [
    "Case",
    "Exported",
    "ExportedPrograms",
    "OnnxModel",
    "OnnxPrograms",
    "Saved",
    "Session",
    "check_files",
    "export",
    "load_folder",
    "require_onnxruntime",
    "unseen_cases",
]
