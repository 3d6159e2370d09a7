"""
Swap a class that cannot be exported
====================================

A class in my model cannot be traced, and I cannot edit it. How do I still export the model and prove the result?
"""

from tempfile import TemporaryDirectory

import torch

import exportkit
from exportkit import apply_patches, check_patch, register_patch_mapping, unregister_patch_mapping


class Gate(torch.nn.Module):  # third-party code that leaves torch for NumPy
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16))

    def forward(self, hidden):
        is_open = torch.from_numpy((hidden @ self.weight).detach().numpy() > 0)
        return torch.where(is_open.unsqueeze(-1), hidden * 2, -hidden)


model = torch.nn.Sequential(torch.nn.Linear(8, 16), Gate(), torch.nn.Linear(16, 16), Gate()).eval()
observer = exportkit.InputObserver()
with observer(model), torch.no_grad():
    model(torch.randn(2, 8))
try:
    exportkit.export(model, observer)
except exportkit.ExportkitError as error:
    print(error)

# %%
# This class computes the same and can be traced. ``check_patch`` runs both classes on the same inputs.


class TraceableGate(Gate):
    def forward(self, hidden):
        return torch.where((hidden @ self.weight > 0).unsqueeze(-1), hidden * 2, -hidden)


print(check_patch(model[1], TraceableGate, torch.randn(50, 16)))

# %%
# Inside the block, the modules of the model have this class and keep their weights. The export reports it.

register_patch_mapping({"Gate": TraceableGate})
with apply_patches(model) as applied:
    print(applied)
    exported = exportkit.export(model, observer)
unregister_patch_mapping(["Gate"])

# %%
# After the block, the model has its original class again, and the proof compares with that.

with TemporaryDirectory() as folder:
    print(exported.to_onnx(f"{folder}/gates.onnx").verify())
