"""Groups of recorded calls: which calls one program may have to serve alone, and what they are called."""

import pytest
import torch
from transformers import DynamicCache

import exportkit
from exportkit.programs.kinds import CallClassifier, groups_of


class Takes(torch.nn.Module):
    def forward(self, ids=None, past=None, pixels=None, mode="add"):
        return ids


def cache(length):
    found = DynamicCache()
    if length is not None:
        found.update(torch.zeros(2, 1, length, 4), torch.zeros(2, 1, length, 4), 0)
    return found


def groups(*calls):
    model, observer = Takes(), exportkit.InputObserver()
    with observer(model, store_n_calls=len(calls)):
        for call in calls:
            model(**call)
    return groups_of(observer.observation, CallClassifier.of(observer.observation))


def ids(length):
    return torch.zeros(2, length, dtype=torch.int64)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([{"ids": ids(5)}, {"ids": ids(6)}], {"": (0, 1)}),
        ([{"ids": ids(5)}, {"ids": ids(1)}], {"several": (0,), "single": (1,)}),
        (
            [
                {"ids": ids(5), "past": cache(None)},
                {"ids": ids(1), "past": cache(5)},
                {"ids": ids(3), "past": cache(6)},
                {"ids": ids(1), "past": cache(9)},
            ],
            {"prefill": (0,), "decode": (1, 3), "continuation": (2,)},
        ),
        (
            [
                {"ids": ids(5), "past": cache(None), "pixels": torch.zeros(1, 3)},
                {"ids": ids(5), "past": cache(None)},
                {"ids": ids(1), "past": cache(5)},
            ],
            {"prefill_with_pixels": (0,), "prefill_without_pixels": (1,), "decode_without_pixels": (2,)},
        ),
        (
            [{"ids": ids(5)}, {"ids": ids(5), "pixels": torch.zeros(1, 3)}],
            {"without_pixels": (0,), "with_pixels": (1,)},
        ),
        ([{"ids": ids(5)}, {"ids": ids(5)[0]}], {"ids_of_rank_2": (0,), "ids_of_rank_1": (1,)}),
        ([{"ids": ids(5)}, {"ids": ids(5), "mode": "double"}], {"several_1": (0,), "several_2": (1,)}),
    ],
)
def test_calls_are_grouped_by_what_they_give_and_named_after_it(calls, expected):
    assert {group.name: group.calls for group in groups(*calls)} == expected


def test_a_cache_of_length_0_is_an_empty_one():
    (found,) = groups({"ids": ids(5), "past": cache(None)}, {"ids": ids(4), "past": cache(0)})
    assert found.calls == (0, 1)


def test_a_cache_whose_layers_hold_nothing_yet_is_an_empty_one():
    new = cache(3)
    new.layers[0].keys = new.layers[0].values = torch.tensor([])
    found = groups({"ids": ids(4)}, {"ids": ids(5), "past": new}, {"ids": ids(1), "past": cache(3)})
    assert {group.name: group.calls for group in found} == {"prefill": (0, 1), "decode": (2,)}


def test_another_batch_and_other_lists_are_no_other_kind():
    pixels = torch.zeros(1, 3)
    found = groups(
        {"ids": ids(5), "pixels": [pixels]}, {"ids": ids(5).expand(1, 2, 5)[0, :1], "pixels": [pixels, pixels]}
    )
    assert len(found) == 1


def test_lists_of_other_lengths_are_a_kind_of_their_own_if_they_matter():
    model, observer, pixels = Takes(), exportkit.InputObserver(), torch.zeros(1, 3)
    with observer(model):
        for count, length in ((1, 5), (2, 5), (1, 7)):
            model(ids(length), pixels=[pixels] * count)
    classifier = CallClassifier.of(observer.observation).with_lists(observer.observation)
    assert [group.calls for group in groups_of(observer.observation, classifier)] == [(0, 2), (1,)]


def test_calls_of_a_cluster_are_numbered_anew():
    found = groups({"ids": ids(5)}, {"ids": ids(1)}, {"ids": ids(7)})[0]
    assert found.calls == (0, 2)
    assert [call.index for call in found.observation.calls] == [0, 1]
    assert [call.shapes()["ids"] for call in found.observation.calls] == [(2, 5), (2, 7)]
