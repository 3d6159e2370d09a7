import unittest

from ..bravo.test_modeling_bravo import BravoModelTest as Inherited
from ...test_modeling_common import ModelTesterMixin


class CharlieModelTest(Inherited):
    all_generative_model_classes = ["BeamlessCharlie"]
    has_attentions = True

    def test_gradient_checkpointing(self):
        pass

    def test_save_load(self):
        raise unittest.SkipTest("Charlie's weights are tied")

    test_forward = unittest.skip("Charlie goes backward")(ModelTesterMixin.test_forward)


del Inherited


@unittest.skip(reason="The vision part is tested elsewhere")
class CharlieVisionTest(ModelTesterMixin, unittest.TestCase):
    def test_only_vision(self):
        pass


@unittest.skip("not this one")
class CharlieHelper:
    pass
