"""The scan needs no torch: neither when it is imported nor when it works."""

import subprocess
import sys
from pathlib import Path

import exportkit


def test_a_scan_imports_nothing_heavy(suite):
    # The package itself imports torch; a stand-in with the same path lets the scan be imported alone.
    code = f"""
import sys, types
package = types.ModuleType("exportkit")
package.__path__ = [{str(Path(exportkit.__file__).parent)!r}]
sys.modules["exportkit"] = package
from exportkit.skipscan import scan_skipped_tests
print(*sys.modules)
scan_skipped_tests({str(suite)!r})
print(*sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after_import, after_scan = (set(line.split()) for line in result.stdout.splitlines())
    heavy = {"torch", "numpy", "transformers", "onnx", "rich", "jinja2", "typer", "pytest"}
    assert "exportkit.skipscan.suite" in after_scan
    assert not (after_import | after_scan) & heavy
