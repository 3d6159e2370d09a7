"""Models with states and masks that only some calls have: what stands for them, and what varies with them."""

import torch

import exportkit
from exportkit.probing.missing import find_missing_defaults
from exportkit.probing.planning import plan_calls


def observed(model, *calls):
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for call in calls:
            model(**call)
    return observer.observation


def tokens(*shape):
    return torch.randint(1, 8, shape)


class LargestSoFar(torch.nn.Module):
    """The largest logarithm so far; with no tokens, that is minus infinity."""

    def forward(self, ids, largest=None):
        x = ids - 8.0
        largest = torch.full_like(x[:, 0], -1e30) if largest is None else largest
        return torch.maximum(largest, x.amax(1))


class Recurrent(torch.nn.Module):
    """Takes a mask for several tokens only, and cuts one that is too long."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(9, 4)

    def forward(self, ids, state=None, mask=None):
        hidden = self.embed(ids)
        if mask is not None and ids.shape[1] > 1:
            hidden = hidden * mask[:, -ids.shape[1] :, None]
        total = hidden.cumsum(1)
        return total if state is None else total + state[:, None]


class RowsMixedInSingleTokens(torch.nn.Module):
    def forward(self, ids, state=None):
        hidden = ids.float()
        if state is None:
            return hidden.cumsum(1)
        return hidden + state if ids.shape[1] == 1 else hidden.cumsum(1) + state[:, None]


def test_a_state_that_holds_a_logarithm_starts_at_minus_infinity():
    model = LargestSoFar()
    observation = observed(model, {"ids": tokens(2, 3)}, {"ids": tokens(2, 1), "largest": -torch.rand(2)})
    fills = find_missing_defaults(plan_calls(observation, model), observation, model, "forward")
    assert fills.values == {"largest": -1e30}
    assert fills.unproven == ()


def test_a_start_that_a_long_call_hides_shows_in_a_short_one():
    model = LargestSoFar()
    long = torch.tensor([[1, 2, 9], [1, 3, 9]])
    observation = observed(model, {"ids": long}, {"ids": tokens(2, 1), "largest": -torch.rand(2)})
    assert find_missing_defaults(plan_calls(observation, model), observation, model, "forward").values == {
        "largest": -1e30
    }


def test_a_mask_that_a_call_ignores_is_filled_with_what_masks_mostly_hold():
    model = Recurrent()
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    calls = {"ids": tokens(2, 4), "mask": mask}, {"ids": tokens(2, 1), "state": torch.rand(2, 4)}
    observation = observed(model, *calls)
    fills = find_missing_defaults(plan_calls(observation, model), observation, model, "forward")
    assert fills.values == {"mask": 1, "state": 0}


def test_a_mask_of_the_prompt_is_as_long_as_the_tokens_though_a_longer_one_would_be_cut():
    model = Recurrent()
    calls = {"ids": tokens(2, 7), "mask": torch.ones(2, 7).long()}, {"ids": tokens(2, 1), "state": torch.rand(2, 4)}
    plan = plan_calls(observed(model, *calls), model)
    assert [str(size) for size in plan.by_path["mask"].sizes] == ["batch", "sequence"]


def test_the_batch_is_found_where_single_tokens_mix_rows():
    model = RowsMixedInSingleTokens()
    calls = {"ids": tokens(1, 5)}, {"ids": tokens(1, 1), "state": torch.rand(1)}
    plan = plan_calls(observed(model, *calls), model)
    assert plan.with_role("batch").name == "batch"
    assert str(plan.by_path["state"].sizes[0]) == "batch"
