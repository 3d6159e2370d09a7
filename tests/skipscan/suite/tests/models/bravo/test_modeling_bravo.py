from unittest import TestCase
from unittest import skip as leave_out

from tests.generation import test_utils as generation
from tests.test_modeling_common import ModelTesterMixin

WHY = "Bravo is recurrent"


class BravoModelTest(ModelTesterMixin, generation.GenerationTesterMixin, TestCase):
    all_model_classes = ("BravoModel", "Broken")
    has_attentions = False
    test_head_masking = False

    @leave_out(WHY)
    def test_gradient_checkpointing(self):
        pass

    def _require_hidden_states(self):
        self.skipTest(f"{WHY}: no hidden states")

    test_resize_embeddings = None

    async def test_stream(self):
        self.skipTest("not recurrent enough")
