"""
A script on graphs, without editing it
======================================

I have a script that does not import exportkit. Do its models return the same results as ONNX graphs?
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

# %%
# This is the program. It takes an option, makes its models itself, and prints what it found.

PROGRAM = """
import argparse

import torch
from transformers import BertConfig, BertForSequenceClassification

parser = argparse.ArgumentParser()
parser.add_argument("--texts", type=int, default=2)
texts = parser.parse_args().texts

torch.manual_seed(0)
small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
model = BertForSequenceClassification(BertConfig(vocab_size=99, num_labels=3, **small)).eval()
for length in (7, 12):
    tokens = torch.randint(1, 99, (texts, length))
    with torch.no_grad():
        print(length, "tokens, classes:", model(tokens).logits.argmax(-1).tolist())
"""

folder = TemporaryDirectory()
script, out = Path(folder.name, "classify.py"), Path(folder.name, "out")
script.write_text(PROGRAM)

# %%
# ``exportkit run`` runs it unchanged, records the calls of its models, exports and proves the models, and runs it again
# with the graphs in their place. On a command line: ``exportkit run classify.py --texts 3 --observe model --out out``.

options = ["--texts", "3", "--observe", "model", "--out", str(out)]
command = [sys.executable, "-m", "exportkit", "run", str(script), *options]
result = subprocess.run(command, capture_output=True, text=True, check=True)
print(result.stdout.replace(folder.name, ""))

# %%
# The folder is like any other: it can be loaded, proven again, and used in place of the model.

print(sorted(path.name for path in out.iterdir()))
