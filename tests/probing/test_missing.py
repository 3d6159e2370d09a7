"""What stands for inputs that a call lacks."""

import torch

from exportkit import InputObserver
from exportkit.plan.solved_sizes import solve_sizes
from exportkit.probing.missing import fill_missing, find_missing_defaults


class Optional(torch.nn.Module):
    def forward(self, x, bias=None, mask=None):
        if bias is not None:
            x = torch.cat([x, bias], dim=1)
        return x if mask is None else x * mask


def observed(model, *calls):
    observer = InputObserver()
    with observer(model, store_n_calls=len(calls)):
        for kwargs in calls:
            model(**kwargs)
    return observer


def x(batch, length):
    return torch.randn(batch, length, 4)


def test_a_free_length_is_zero_and_known_sizes_are_taken_from_the_call():
    model = Optional()
    observer = observed(model, {"x": x(2, 5), "bias": x(2, 3)}, {"x": x(3, 7)}, {"x": x(3, 6), "bias": x(3, 2)})
    missing = fill_missing(observer.plan(), {"x": x(4, 9)}, {})
    assert missing["bias"].shape == (4, 0, 4)


def test_a_mask_that_is_left_out_is_a_mask_of_ones():
    model = Optional()
    observer = observed(
        model, {"x": x(2, 5), "mask": torch.rand(2, 5, 4)}, {"x": x(3, 7)}, {"x": x(3, 6), "mask": x(3, 6)}
    )
    fills = find_missing_defaults(observer.plan(), observer.observation, model, "forward")
    assert fills.values == {"mask": 1}
    assert fills.unproven == ()


def test_an_input_whose_absence_nothing_can_stand_for_is_said_to_be_so():
    class Branches(torch.nn.Module):
        def forward(self, x, y=None):
            return x * 3 if y is None else x + y

    model = Branches()
    observer = observed(model, {"x": x(2, 5), "y": x(2, 5)}, {"x": x(3, 7)}, {"x": x(3, 6), "y": x(3, 6)})
    assert find_missing_defaults(observer.plan(), observer.observation, model, "forward").unproven == (1,)


def test_the_past_is_what_total_and_new_tokens_leave():
    class Decoder(torch.nn.Module):
        def forward(self, ids, mask, past):
            return ids.sum() + mask.sum() + past.sum()

    observer = observed(
        Decoder(),
        *(
            {"ids": torch.ones(1, s), "mask": torch.ones(1, p + s), "past": torch.ones(1, p)}
            for s, p in ((4, 3), (1, 7), (2, 9))
        ),
    )
    plan = observer.plan(probe=False)
    names = {leaf.path: leaf.sizes[1] for leaf in plan.leaves}
    sizes = solve_sizes(plan, {"ids": (1, 2), "mask": (1, 9)})
    assert names["past"].evaluate(sizes) == 7
