"""Stage 4, export: one ExportedProgram, and from it an ONNX file that is called like the model."""

from exportkit.export.exported import Exported, export
from exportkit.export.onnx_model import OnnxModel
from exportkit.export.session import Session, require_onnxruntime

__all__ = ["Exported", "OnnxModel", "Session", "export", "require_onnxruntime"]
