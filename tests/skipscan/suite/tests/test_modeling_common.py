import unittest

from .testing_tools import is_accelerator_available, require_accelerator, slow


class ModelTesterMixin:
    all_model_classes = ()
    has_attentions = True
    test_head_masking = True  # an option of the mixin, not a test

    def test_forward(self):
        """Says that @unittest.skip("this is text") in a docstring skips nothing."""

    def test_attention_outputs(self):
        if not self.has_attentions:
            self.skipTest(reason="Model does not output attentions")

    def test_head_masks(self):
        if not self.test_head_masking:
            self.skipTest("head masks are off")

    def test_model_classes(self):
        for model_class in self.all_model_classes:
            if model_class == "Broken":
                self.skipTest(f"{model_class} is broken")

    def test_hidden_states(self):
        self._require_hidden_states()

    def _require_hidden_states(self):
        pass

    def test_save_load(self):
        pass

    def test_resize_embeddings(self):
        pass

    def test_gradient_checkpointing(self):
        pass

    @unittest.skip(reason="Skipped for everyone")
    def test_everywhere(self):
        pass

    @require_accelerator
    def test_on_accelerator(self):
        pass

    @slow
    def test_large(self):
        pass

    def test_needs_accelerator_inside(self):
        if not is_accelerator_available():
            self.skipTest("no accelerator")
