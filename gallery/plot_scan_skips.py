"""
Which tests do my models skip, and why?
=======================================

The small suite in this example has the layout of transformers: shared tests, and a folder for each model.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent

from exportkit import scan_skipped_tests

folder = TemporaryDirectory()
root = Path(folder.name)


def write(name, text):
    path = root / "tests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))


write("test_modeling_common.py", """
    class ModelTesterMixin:
        has_attentions = True
        def test_forward(self): ...
        def test_resize(self): ...
        def test_attentions(self):
            if not self.has_attentions:
                self.skipTest("no attentions")
""")  # fmt: skip
for model, body in {
    "bert": '@unittest.skip("BERT\'s head " f"is {NAME}")\n    def test_resize(self): ...',
    "mamba": "has_attentions = False",
    "llama": '@unittest.skipIf(False, "never")\n    def test_forward(self): ...',
}.items():
    head = "import unittest\nfrom ...test_modeling_common import ModelTesterMixin\nNAME = 'tied'\n"
    test = f"class {model.title()}Test(ModelTesterMixin, unittest.TestCase):\n    {body}\n"
    write(f"models/{model}/test_modeling_{model}.py", head + test)

# %%
# No test runs, and nothing is imported: the files are parsed. The most skipped tests come first.

scan = scan_skipped_tests(root)
print("\n".join(str(row) for row in scan.rows))

# %%
# The same as JSON. ``scan.to_html()`` returns a page to sort and filter, and ``scan.save(folder)`` writes the files.

print(scan.to_json()["test_attentions"])

folder.cleanup()
