"""Tokens that stand for rows of features: found, confirmed by the model, and put where they belong."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import exportkit
from exportkit.arguments.build import build_call, with_tokens
from exportkit.errors import ArgumentError
from exportkit.plan.placeholders import Grids, Placeholder, needed_tokens, tokens_fit
from exportkit.probing.planning import plan_calls
from tests.models import Captioner

TOKENS = torch.tensor([[1, 7, 7, 3, 4], [1, 7, 7, 5, 6]])
ROWS = "features.pooled[0]"


@pytest.fixture
def plan():
    torch.manual_seed(0)
    model, observer = Captioner().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model.caption(TOKENS, torch.randn(2, 2, 3))
    return plan_calls(observer.observation, model)


def test_the_model_confirms_which_token_stands_for_rows(plan):
    assert plan.placeholders == (Placeholder("tokens", 7, ROWS, 1),)


def test_the_rows_are_a_variable_of_their_own(plan):
    assert [str(size) for size in plan.by_path[ROWS].sizes] == ["feature_rows", "4"]
    assert [str(size) for size in plan.by_path["tokens"].sizes] == ["batch", "sequence"]
    assert (
        plan.variable("feature_rows").evidence
        == "as many as token 7 occurs in tokens; the model raises for other numbers"
    )


def test_built_arguments_have_as_many_placeholders_as_rows(plan):
    sizes = {variable.name: 3 for variable in plan.variables} | {"feature_rows": 5}
    tensors = build_call(plan, plan.observation, sizes).tensors()
    assert tensors[ROWS].shape[0] == 5
    assert int((tensors["tokens"] == 7).sum()) == 5


def test_more_rows_than_tokens_are_an_error(plan):
    sizes = {variable.name: 2 for variable in plan.variables} | {"feature_rows": 4}
    with pytest.raises(ArgumentError) as error:
        build_call(plan, plan.observation, sizes)
    assert str(error.value) == (
        "There are fewer token ids than placeholders.\n"
        "  where: tokens\n"
        "  expected: token 7 4 times\n"
        "  got: tokens (2, 2)\n"
        "  hint: choose more tokens, or fewer rows of features."
    )


class Marked(Captioner):
    """A captioner that is also told where the placeholders are, if there are any."""

    def forward(self, tokens, features=None, marks=None):
        result = super().forward(tokens, features)
        return {**result, "logits": result["logits"] + (0 if marks is None else marks.unsqueeze(-1))}

    def caption(self, tokens, pixels):
        features = self.get_image_features(pixels)
        return self(tokens, features=features, marks=(tokens == self.placeholder).long()), self(tokens[:, :1] * 0 + 1)


def test_marks_are_as_long_as_tokens_and_every_row_of_the_proof_has_room_for_the_features(tmp_path):
    torch.manual_seed(0)
    model, observer = Marked().eval(), exportkit.InputObserver()
    with observer(model), torch.no_grad():
        model.caption(TOKENS, torch.randn(2, 2, 3))
    exported = exportkit.export(model, observer)
    assert [str(size) for size in exported.plan.by_path["marks"].sizes] == ["batch", "sequence"]
    report = exported.to_onnx(tmp_path / "model.onnx").verify()
    assert report.ok
    assert {row.status for row in report.rows} == {"proven"}
    assert report.limits == ("sequence >= 1", "feature_rows >= 0", "batch >= 1")
    patterns = {str(pattern) for pattern in exported.domain.patterns}
    assert 0 < len(patterns.intersection(row.label for row in report.rows)) < len(patterns)


def test_equal_numbers_by_accident_are_no_placeholder():
    class Sums(torch.nn.Module):
        def forward(self, tokens, rows=None):
            return tokens * (1 if rows is None else rows.sum())

    model, observer = Sums(), exportkit.InputObserver()
    with observer(model):
        model(TOKENS, rows=torch.ones(4, 3))
        model(TOKENS[:, :1])
    assert plan_calls(observer.observation, model).placeholders == ()


@given(
    st.integers(1, 4), st.integers(2, 9), st.lists(st.integers(0, 3), min_size=1, max_size=3),
)  # fmt: skip
def test_tokens_occur_exactly_as_often_as_wanted(batch, length, counts):
    if sum(counts) >= batch * length:
        return
    ids = torch.randint(0, 6, (batch, length))
    wanted = dict(enumerate(counts, start=3))
    found = with_tokens(ids, wanted, [(value, 1) for value, count in wanted.items() for _ in range(count)])
    assert {value: int((found == value).sum()) for value in wanted} == wanted
    assert found.shape == ids.shape


def test_needed_tokens_come_from_rows_and_factors():
    placeholders = (Placeholder("ids", 7, "images", 4), Placeholder("ids", 8, "frames", 1))
    shapes = {"ids": (2, 9), "images": (3, 3, 8, 8), "frames": (5, 2)}
    assert needed_tokens(placeholders, shapes) == {"ids": [(7, 1)] * 12 + [(8, 1)] * 5}
    assert tokens_fit(placeholders, shapes)
    assert not tokens_fit(placeholders, {**shapes, "frames": (6, 2)})
    assert tokens_fit(placeholders, {"ids": (1, 1), "images": (0, 3, 8, 8), "frames": (0, 2)})


class Strip(torch.nn.Module):
    """Takes the patches of all images along the last axis, four pixels for each."""

    def forward(self, pixels, image_sizes):
        return pixels.unflatten(-1, (int(image_sizes.prod(-1).sum()), 4)).mean((1, 2, 4)) * image_sizes.sum()


class Padded(torch.nn.Module):
    """Takes as many patches for each image as the largest one has."""

    def forward(self, patches, sizes):
        inside = torch.arange(int(sizes.prod(-1).max())) < sizes.prod(-1, keepdim=True)
        return torch.where(inside, patches.mean(-1), 0.0)


@pytest.mark.parametrize("grids", [[[[4, 4]], [[2, 6], [4, 4]]], [[[4, 4]], [[2, 6]]]])
def test_grids_say_how_many_patches_are_along_any_axis(grids):
    plan = plan_of(Strip(), [(torch.randn(1, 3, 2, 4 * sum(h * w for h, w in each)), each) for each in grids])
    assert plan.grids == (Grids("image_sizes", "pixels", ((4, 4), (2, 6)), axis=3, per=4),)
    assert str(plan.by_path["pixels"].sizes[3]) == "4*image_patches"
    assert plan.shapes(plan.completed({"images": 3, "image_patches": 0})) == {
        "pixels": (1, 3, 2, 4 * 44),
        "image_sizes": (3, 2),
    }
    assert exportkit.Plan.from_json(plan.to_json()).grids == plan.grids


def test_rows_of_a_batch_are_not_the_patches_of_all_images():
    calls = [(torch.randn(n, side * 4, 8), [[side, 4]] * n) for n, side in ((1, 4), (1, 6), (2, 3))]
    for recorded in (calls, calls[:2]):
        assert plan_of(Padded(), recorded).grids == ()


def plan_of(model, calls):
    observer = exportkit.InputObserver()
    with observer(model):
        for rows, grids in calls:
            model(rows, torch.tensor(grids))
    return observer.plan()
