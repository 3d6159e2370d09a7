"""Stage 5, prove: onnxruntime against the model, at recorded sizes and at sizes that nobody has run."""

from exportkit.verify.compare import Difference, compare_tensors
from exportkit.verify.prove import verify, verify_programs
from exportkit.verify.recorded import Tolerance, check_recorded_calls
from exportkit.verify.report import Report, Row

__all__ = [
    "Difference",
    "Report",
    "Row",
    "Tolerance",
    "check_recorded_calls",
    "compare_tensors",
    "verify",
    "verify_programs",
]
