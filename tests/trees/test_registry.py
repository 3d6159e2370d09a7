"""Inside the context, torch opens caches; after it, torch knows nothing about them."""

import io
import subprocess
import sys
import textwrap
import threading

import optree
import pytest
import torch
import torch.utils._cxx_pytree  # from here on optree knows torch's registrations
from torch.utils import _pytree
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from transformers.models.xlstm.modeling_xlstm import xLSTMCache, xLSTMConfig

from exportkit import make_dynamic_cache, register_flattening_functions
from exportkit.trees import flatten
from tests.models import random_cache
from tests.trees.caches import assert_same, filled

D = torch.export.Dim.DYNAMIC


class MeanOfCache(torch.nn.Module):
    def forward(self, cache):
        return cache.layers[0].keys.mean(2) + cache.layers[0].values.mean(2)


class Extends(torch.nn.Module):
    def forward(self, x, cache):
        keys, values = cache.update(x, x * 2, 0)
        return keys + values, cache


def _registries():
    """Everything that torch and optree keep about registered classes."""
    return (
        dict(_pytree.SUPPORTED_NODES),
        dict(_pytree.SUPPORTED_SERIALIZED_TYPES),
        dict(_pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE),
        set(_pytree.CONSTANT_NODES),
        optree.register_pytree_node.get(namespace="torch"),
        set(torch.serialization.get_safe_globals()),
    )


@pytest.fixture(autouse=True)
def _registries_as_before():
    before = _registries()
    yield
    assert _registries() == before


def _is_registered(cls=DynamicCache):
    known = cls in _pytree.SUPPORTED_NODES
    assert (cls in optree.register_pytree_node.get(namespace="torch")) == known
    return known


def _run(code):
    """Runs code in a Python process of its own; what it prints is the result."""
    script = textwrap.dedent(code)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_caches_are_registered_inside_the_context_only():
    for cls in (DynamicCache, StaticCache, EncoderDecoderCache):
        assert not _is_registered(cls)
        with register_flattening_functions():
            assert _is_registered(cls)
        assert not _is_registered(cls)


def test_registrations_are_taken_back_after_an_error():
    with pytest.raises(ZeroDivisionError), register_flattening_functions():
        raise ZeroDivisionError
    assert not _is_registered()


def test_leaves_come_layer_by_layer_and_are_not_copied():
    cache = random_cache(3)
    with register_flattening_functions():
        leaves = _pytree.tree_leaves(cache)
        optree_leaves = optree.tree_leaves(cache, namespace="torch")

    expected = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert [id(leaf) for leaf in leaves] == [id(tensor) for tensor in expected]
    assert [id(leaf) for leaf in optree_leaves] == [id(tensor) for tensor in expected]


def test_torch_names_the_leaves_by_their_paths():
    with register_flattening_functions():
        paths, _ = _pytree.tree_flatten_with_path({"cache": random_cache(3, layers=1)})
    assert [_pytree.keystr(path) for path, _ in paths] == [
        "['cache']['layers[0].keys']",
        "['cache']['layers[0].values']",
    ]


def test_context_can_be_used_again():
    for _ in range(3):
        with register_flattening_functions():
            assert _is_registered()
        assert not _is_registered()


def test_nested_contexts_hold_the_registration_until_the_last_is_left():
    with register_flattening_functions():
        with register_flattening_functions():
            assert _is_registered()
        assert _is_registered()
    assert not _is_registered()


def test_contexts_may_be_left_in_any_order():
    first, second = register_flattening_functions(), register_flattening_functions()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert _is_registered()
    second.__exit__(None, None, None)
    assert not _is_registered()


def test_context_works_as_a_decorator():
    @register_flattening_functions()
    def registered():
        return _is_registered()

    assert registered()
    assert registered()


def test_contexts_of_several_threads_do_not_disturb_each_other():
    failures = []
    start = threading.Barrier(4)

    def work():
        cache = make_dynamic_cache([(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1))])
        start.wait()
        for _ in range(30):
            with register_flattening_functions():
                try:
                    assert len(_pytree.tree_leaves(cache)) == 2
                except Exception as error:
                    failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failures
    assert not _is_registered()


def test_registration_by_other_code_is_used_and_left_alone():
    def flatten(cache):
        return [layer.keys for layer in cache.layers], None

    _pytree.register_pytree_node(DynamicCache, flatten, lambda leaves, _: leaves, serialized_type_name="theirs")
    try:
        theirs = _pytree.SUPPORTED_NODES[DynamicCache]
        with register_flattening_functions():
            assert _pytree.SUPPORTED_NODES[DynamicCache] is theirs
            assert _is_registered(StaticCache)
            assert len(_pytree.tree_leaves(random_cache(3))) == 2
        assert _pytree.SUPPORTED_NODES[DynamicCache] is theirs
    finally:
        _pytree._deregister_pytree_node(DynamicCache)
        optree.unregister_pytree_node(DynamicCache, namespace="torch")


def test_registration_that_replaced_ours_meanwhile_is_left_alone():
    with register_flattening_functions():
        _pytree._deregister_pytree_node(DynamicCache)
        optree.unregister_pytree_node(DynamicCache, namespace="torch")
        _pytree.register_pytree_node(
            DynamicCache, lambda cache: ([], None), lambda leaves, _: leaves, serialized_type_name="theirs"
        )
        theirs = _pytree.SUPPORTED_NODES[DynamicCache]
    try:
        assert _pytree.SUPPORTED_NODES[DynamicCache] is theirs
    finally:
        _pytree._deregister_pytree_node(DynamicCache)
        optree.unregister_pytree_node(DynamicCache, namespace="torch")


def test_registration_that_was_removed_is_not_an_error():
    with register_flattening_functions():
        _pytree._deregister_pytree_node(DynamicCache)
        optree.unregister_pytree_node(DynamicCache, namespace="torch")
    assert not _is_registered()


def test_subclass_made_by_a_user_is_registered():
    class MyCache(DynamicCache):
        pass

    with register_flattening_functions():
        cache = MyCache()
        cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
        rebuilt = _pytree.tree_map(torch.neg, cache)
    assert type(rebuilt) is MyCache
    assert rebuilt.layers[0].keys.sum() == -24


def test_cache_class_that_a_model_defines_for_itself_is_registered():
    with register_flattening_functions():
        assert _is_registered(MiniMaxCache)


def test_cache_that_does_not_inherit_from_those_of_transformers_is_registered_once_it_was_flattened():
    config = xLSTMConfig(num_hidden_layers=1, hidden_size=8, num_heads=2, vocab_size=16)
    flatten(xLSTMCache(config, max_batch_size=1))
    with register_flattening_functions():
        assert _is_registered(xLSTMCache)
    assert not _is_registered(xLSTMCache)


def test_layers_and_modules_are_not_registered():
    from transformers.cache_utils import DynamicLayer

    with register_flattening_functions():
        assert not _is_registered(DynamicLayer)
        classes = [cls for cls in _pytree.SUPPORTED_NODES if isinstance(cls, type)]
        assert not any(issubclass(cls, torch.nn.Module) for cls in classes)


def test_permanent_registration_by_transformers_is_possible_and_left_alone():
    assert _run("""
        import torch
        from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model
        from exportkit import InputObserver, register_flattening_functions
        from tests.models import random_ids, tiny_llama

        nodes = torch.utils._pytree.SUPPORTED_NODES
        model, observer = tiny_llama(), InputObserver()
        with register_flattening_functions():
            pass
        register_cache_pytrees_for_model(model)
        theirs = dict(nodes)
        with observer(model):
            model.generate(random_ids(1, 4), max_new_tokens=3, min_new_tokens=3, do_sample=False)
        with register_flattening_functions():
            print(all(nodes[cls] is node for cls, node in theirs.items()))
            cache = observer.infer_arguments(1)["past_key_values"]
            print(len(torch.utils._pytree.tree_leaves(cache)))
        print(nodes == theirs)
        print(len(observer.infer_dynamic_shapes()["past_key_values"]))
    """) == ["True", "4", "True", "4"]


def test_a_registration_that_lists_more_tensors_than_there_are_inputs_is_left_out_of_an_export():
    assert _run("""
        import torch
        from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model
        from exportkit import InputObserver, export
        from tests.models import random_ids, tiny_mistral

        nodes = torch.utils._pytree.SUPPORTED_NODES
        model, observer = tiny_mistral(), InputObserver()
        register_cache_pytrees_for_model(model)
        theirs = dict(nodes)
        with observer(model):
            model.generate(random_ids(2, 4), max_new_tokens=3, min_new_tokens=3, do_sample=False)
        print(len(observer.infer_dynamic_shapes()["past_key_values"]))  # with the tensor of the window of each layer
        print(len([path for path in export(model, observer).inputs if "past_key_values" in path]))
        print(nodes == theirs)
    """) == ["6", "4", "True"]


def test_caches_made_inside_are_known_although_transformers_was_not_loaded_before():
    assert _run("""
        import torch
        from exportkit import make_dynamic_cache, register_flattening_functions

        with register_flattening_functions():
            cache = make_dynamic_cache([(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))])
            print(len(torch.utils._pytree.tree_leaves(cache)))
    """) == ["2"]


def test_without_transformers_there_is_nothing_to_register_unless_one_insists():
    assert _run("""
        import sys
        from exportkit import register_flattening_functions

        sys.modules["transformers"] = None
        with register_flattening_functions():
            print("entered")
        try:
            with register_flattening_functions(patch_transformers=True):
                print("entered")
        except ImportError:
            print("ImportError")
    """) == ["entered", "ImportError"]


def test_structure_of_a_cache_survives_writing_as_text():
    for kind in ("DynamicCache", "DynamicSlidingWindowLayer", "StaticLayer", "LinearAttentionLayer"):
        cache = filled(kind)
        with register_flattening_functions():
            leaves, structure = _pytree.tree_flatten(cache)
            read = _pytree.treespec_loads(_pytree.treespec_dumps(structure))
            assert read == structure
            assert_same(cache, _pytree.tree_unflatten(leaves, read))


def test_structure_of_an_encoder_decoder_cache_survives_writing_as_text():
    cache = filled("EncoderDecoderCache")
    with register_flattening_functions():
        leaves, structure = _pytree.tree_flatten(cache)
        read = _pytree.treespec_loads(_pytree.treespec_dumps(structure))
        assert_same(cache, _pytree.tree_unflatten(leaves, read))


def test_structure_with_something_that_no_text_can_hold_is_refused_with_its_class():
    cache = random_cache(3, layers=1)
    cache.stream = {1, 2}
    with register_flattening_functions():
        _, structure = _pytree.tree_flatten(cache)
        with pytest.raises(TypeError, match="A cache holds a value of class set"):
            _pytree.treespec_dumps(structure)


def test_program_with_a_cache_can_be_saved_and_loaded():
    shapes = ({0: D, 2: D}, [{0: D, 2: D}] * 2)
    model, file = Extends(), io.BytesIO()
    with register_flattening_functions():
        example = (torch.randn(3, 4, 2, 32), random_cache(5, batch=3, layers=1))
        program = torch.export.export(model, example, dynamic_shapes=shapes)
        torch.export.save(program, file)

    file.seek(0)
    with register_flattening_functions():
        loaded = torch.export.load(file).module()
        x, cache = torch.randn(2, 4, 1, 32), random_cache(7, batch=2, layers=1)
        output, extended = loaded(x, cache)
        expected, reference = model(x, cache)

    assert torch.equal(output, expected)
    assert type(extended) is DynamicCache
    assert extended.get_seq_length() == 8
    assert_same(reference, extended)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_strict_trace_takes_a_cache_and_flattens_it():
    class Doubled(torch.nn.Module):
        def forward(self, x, cache):
            tensors = flatten({"x": x, "cache": cache}).map(lambda leaf: leaf * 2).tensors()
            return [tensors["x"], tensors["cache.layers[0].keys"]]

    shapes = ({0: D}, [{0: D, 2: D}] * 2)
    with register_flattening_functions():
        example = (torch.randn(3, 4), random_cache(5, batch=3, layers=1))
        program = torch.export.export(Doubled(), example, dynamic_shapes=shapes, strict=True).module()
        x, cache = torch.randn(2, 4), random_cache(7, batch=2, layers=1)
        doubled = program(x, cache)

    assert torch.equal(doubled[0], x * 2)
    assert torch.equal(doubled[1], cache.layers[0].keys * 2)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_program_with_a_cache_exports_to_onnx():
    shapes = ([{0: D, 2: D}] * 2,)
    with register_flattening_functions():
        program = torch.export.export(MeanOfCache(), (random_cache(5, batch=3, layers=1),), dynamic_shapes=shapes)
        onnx_program = torch.onnx.export(program, verbose=False)

    names = [value.name for value in onnx_program.model.graph.inputs]
    assert names == ["cache_layers_0__keys", "cache_layers_0__values"]
