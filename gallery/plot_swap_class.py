"""
Swap a class that cannot be exported
====================================

One class of my model cannot be traced, and I may not edit it. How do I export all the same, and prove it?
"""

from tempfile import TemporaryDirectory

import torch

import exportkit
from exportkit import apply_patches, check_patch, register_patch_mapping, unregister_patch_mapping


class Gate(torch.nn.Module):  # code of somebody else: it decides in Python, row by row
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16))

    def forward(self, hidden):
        return torch.stack([row * 2 if (row @ self.weight).item() > 0 else -row for row in hidden])


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), Gate(), torch.nn.Linear(16, 16), Gate()).eval()
observer = exportkit.InputObserver()
with observer(model), torch.no_grad():
    model(torch.randn(2, 8))
try:
    exportkit.export(model, observer)
except exportkit.ExportkitError as error:
    print(error)

# %%
# A class that computes the same and can be traced. ``check_patch`` runs both on the same inputs.


class TraceableGate(Gate):
    def forward(self, hidden):
        return torch.where((hidden @ self.weight > 0).unsqueeze(-1), hidden * 2, -hidden)


print(check_patch(model[1], TraceableGate, torch.randn(50, 16)))

# %%
# In the block the live modules are of that class, with the weights that they have. The export says so.

register_patch_mapping({"Gate": TraceableGate})
with apply_patches(model) as applied:
    print(applied)
    exported = exportkit.export(model, observer)
unregister_patch_mapping(["Gate"])

# %%
# The proof compares with the model as it is again: with the class of somebody else.

with TemporaryDirectory() as folder:
    print(exported.to_onnx(f"{folder}/gates.onnx").verify())
