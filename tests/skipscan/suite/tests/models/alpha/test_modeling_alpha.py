import unittest

from ...generation.test_utils import GenerationTesterMixin
from ...test_modeling_common import ModelTesterMixin


class AlphaModelTest(ModelTesterMixin, GenerationTesterMixin, unittest.IsolatedAsyncioTestCase):
    all_model_classes = ("AlphaModel", "AlphaForCausalLM")
    all_generative_model_classes = ("AlphaForCausalLM",)

    @unittest.skip(
        reason="Alpha's embeddings"
        " can't be resized"
    )
    def test_resize_embeddings(self):
        pass

    @unittest.skip("Alpha does not stream")
    async def test_stream(self):
        pass

    @unittest.skipIf(False, "never")
    def test_save_load(self):
        pass
