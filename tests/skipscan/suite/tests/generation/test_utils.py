import unittest


class GenerationTesterMixin:
    all_generative_model_classes = ()

    def test_greedy_generate(self):
        if len(self.all_generative_model_classes) == 0:
            self.skipTest(reason="No generative model classes")

    def test_beam_search_generate(self):
        for model_class in self.all_generative_model_classes:
            if model_class.startswith("Beamless"):
                self.skipTest("won't do beam search")

    async def test_stream(self):
        pass


class UtilitiesTest(unittest.TestCase):
    def test_of_its_own(self):
        pass
