"""Code to paste."""

import torch

import exportkit


def namespace_of(plan):
    namespace = {}
    exec(plan.source(), namespace)
    return namespace


class Nested(torch.nn.Module):
    def forward(self, data, pair, scale=1.0):
        return data["x"] * pair[0] * scale + pair[1][0]


def observed(model, *calls):
    observer = exportkit.InputObserver()
    with observer(model):
        for kwargs in calls:
            model(**kwargs)
    return observer


def test_the_code_is_what_torch_export_accepts():
    model = Nested()
    x = [torch.randn(n, 6) for n in (2, 3)]
    observer = observed(model, *({"data": {"x": v}, "pair": (v, [v]), "scale": 2.0} for v in x))
    found = namespace_of(observer.plan())
    dynamic = torch.export.Dim.DYNAMIC
    assert found["dynamic_shapes"] == {
        "data": {"x": {0: dynamic}},
        "pair": ({0: dynamic}, [{0: dynamic}]),
        "scale": None,
    }
    kwargs = observer.infer_arguments(exportable=True)
    torch.export.export(model, (), kwargs=kwargs, dynamic_shapes=found["dynamic_shapes"])


def test_names_are_those_of_the_plan_and_equal_leaves_are_written_once():
    class Decoder(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None):
            if past_key_values is not None:
                past_key_values.layers[0].keys.sum()
            return input_ids

    cache = [exportkit.make_dynamic_cache([(torch.ones(1, 2, n, 8), torch.ones(1, 2, n, 8))] * 3) for n in (5, 6)]
    ids = torch.ones(1, 1, dtype=torch.int64)
    calls = [
        {"input_ids": torch.ones(1, 5, dtype=torch.int64)},
        *({"input_ids": ids, "past_key_values": c} for c in cache),
    ]
    source = observed(Decoder(), *calls).plan().source()
    assert "'past_key_values': [{0: DYNAMIC, 2: DYNAMIC}] * 6" in source
    assert "'past_key_values': [{0: 'batch', 2: 'past_sequence'}] * 6" in source
