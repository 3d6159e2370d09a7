"""Arguments that the config of a module fills in."""

from types import SimpleNamespace

import pytest
from torch import nn

from exportkit import capture_outputs, merge_with_config_defaults
from exportkit.errors import InvalidRequestError


class Model(nn.Module):
    def __init__(self, **config):
        super().__init__()
        if config:
            self.config = SimpleNamespace(**config)

    @merge_with_config_defaults
    def forward(self, x, use_cache=None, vision_feature_select_strategy=None, **kwargs):
        return use_cache, vision_feature_select_strategy, kwargs


def test_the_config_fills_what_is_missing_or_none():
    model = Model(use_cache=True, vision_feature_select_strategy="full", vision_feature_layer=-2)
    expected = (True, "full", {"vision_feature_layer": -2})
    assert model(1) == model(1, None) == model(1, use_cache=None) == expected


def test_what_is_given_wins_by_position_and_by_name():
    model = Model(use_cache=True)
    assert model(1, False)[0] is False
    assert model(1, use_cache=False)[0] is False
    assert model(1, False, vision_feature_layer=3) == (False, None, {"vision_feature_layer": 3})


def test_a_module_without_config_runs_as_before():
    assert Model()(1) == (None, None, {})
    assert Model()(1, True) == (True, None, {})


def test_a_forward_gets_nothing_that_it_does_not_take():
    class Narrow(Model):
        @merge_with_config_defaults
        @capture_outputs
        def forward(self, x):
            return x

    assert Narrow(use_cache=True)(1) == 1


def test_no_cache_while_training_with_checkpoints():
    model = Model(use_cache=True)
    model.gradient_checkpointing = True
    with pytest.warns(UserWarning, match="use_cache is False"):
        assert model(1)[0] is False
    assert model.eval()(1)[0] is True


def test_an_unknown_strategy_is_refused():
    with pytest.raises(InvalidRequestError, match="default or full"):
        Model()(1, vision_feature_select_strategy="half")
