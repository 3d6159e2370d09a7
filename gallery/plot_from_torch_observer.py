"""
From torch.onnx.InputObserver or yobx to exportkit
==================================================

I have code for ``torch.onnx.InputObserver``. What do I change, and what changes?
"""

from tempfile import TemporaryDirectory

import torch

import exportkit

# %%
# Change the import. These functions have the same name and the same meaning in all three packages:
#
# - ``with observer(model):``, ``infer_dynamic_shapes``, ``infer_arguments``, ``check_discrepancies``, ``num_obs``,
#   ``remove_inputs``, ``value_if_missing``.
#
# Replacements for the rest:
#
# - ``torch.onnx.export(model, ...)`` or yobx's ``to_onnx``: ``exportkit.export(model, observer).to_onnx(path)``.
# - ``register_flattening_functions`` of yobx: only needed if you call ``torch.export`` yourself. The name is the same.
# - The patches that yobx applies around an export: not needed. exportkit selects its rewrites itself, and reports them.


class Attention(torch.nn.Module):
    def forward(self, query, keys=None):
        keys = query if keys is None else torch.cat([keys, query], dim=1)
        return (query @ keys.transpose(1, 2)).softmax(-1) @ keys, keys


torch.manual_seed(0)
model = Attention()
theirs, ours = torch.onnx.InputObserver(), exportkit.InputObserver()
for observer in (theirs, ours):
    with observer(model):
        _, keys = model(torch.rand(1, 3, 8))
        for _ in range(2):
            _, keys = model(torch.rand(1, 1, 8), keys=keys)
    print(observer.infer_dynamic_shapes(set_batch_dimension_for=True))
    print(exportkit.string_type(observer.infer_arguments(), with_shape=True))

# %%
# These arguments have batch 1, so torch.export cannot use them. With ``exportable=True``, their sizes can be exported.

shapes = ours.infer_dynamic_shapes(set_batch_dimension_for=True)
for arguments in (ours.infer_arguments(), ours.infer_arguments(exportable=True)):
    try:
        torch.export.export(model, (), arguments, dynamic_shapes=shapes)
        print(exportkit.string_type(arguments, with_shape=True), "exported")
    except ValueError as error:
        print(*[line for line in str(error).splitlines() if "specialized" in line], sep="\n")

# %%
# ``export`` does all of this, and ``verify`` proves the graph.

with TemporaryDirectory() as folder:
    print(exportkit.export(model, ours).to_onnx(f"{folder}/model.onnx").verify())
