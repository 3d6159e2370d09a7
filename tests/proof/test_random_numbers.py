"""Models that draw random numbers: a proof gives the graph the numbers that it gives the model."""

import onnx
import pytest
import torch
from torch import distributions
from torch.nn import functional

import exportkit
from exportkit._torch_compat.random_numbers import fixed_numbers
from exportkit.errors import ExportError, ExportkitError


def as_onnx(model, folder, *calls, random_numbers=True):
    torch.manual_seed(0)
    observer = exportkit.InputObserver()
    with observer(model), torch.no_grad():
        for call in calls:
            model(*call)
    return exportkit.export(model, observer, random_numbers=random_numbers).to_onnx(folder / "model.onnx")


torch.manual_seed(0)
CALLS = ((torch.randn(1, 6, 4),), (torch.randn(2, 9, 4),), (torch.randn(3, 12, 4),))


class Drawing(torch.nn.Module):
    """What a function makes of the result of a layer."""

    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = torch.nn.Linear(4, 4), draw

    def forward(self, x):
        return self.draw(self.layer(x))


DRAWS = {
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.2, training=True),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) + x,
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.2) + x,
    "categorical": lambda x: distributions.Categorical(logits=x).sample().float() + x[..., 0],
    "cauchy": lambda x: torch.empty_like(x).cauchy_(0.5, 2.0).clamp(-20, 20) + x,
    "dropout": lambda x: functional.dropout(x, 0.3, training=True),
    "dropout1d": lambda x: functional.dropout1d(x, 0.3, training=True),
    "exponential": lambda x: x + torch.empty_like(x).exponential_(2.0),
    "geometric": lambda x: x + torch.empty_like(x).geometric_(0.3),
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x, tau=0.7, hard=True) + x,
    "log_normal": lambda x: x + torch.empty_like(x).log_normal_(0.1, 0.5),
    "masked autoencoder": lambda x: x.gather(1, torch.rand_like(x).argsort(1)[:, : x.shape[1] // 2]).sum(1),
    "multinomial": lambda x: x[..., 0] + torch.multinomial(x[:, 0].softmax(-1), 1),
    "multinomial, more": lambda x: x[:, 0, :3] + torch.multinomial(x[:, 0].softmax(-1), 3),
    "multinomial, again": lambda x: x[:, 0] + torch.multinomial(x[:, 0].softmax(-1), 4, replacement=True),
    "normal": lambda x: torch.normal(x, x.exp()),
    "normal, number": lambda x: torch.normal(x, 2.0),
    "normal, numbers": lambda x: x + torch.normal(1.0, 2.0, x.shape),
    "normal_": lambda x: x + torch.empty_like(x).normal_(0.5, 2.0),
    "rand": lambda x: x + torch.rand(x.shape[1], 1),
    "randint": lambda x: x + torch.randint(3, 9, x.shape),
    "randint_like": lambda x: x + torch.randint_like(x, 7),
    "randn": lambda x: x + torch.randn(len(x), 1, 1),
    "random_": lambda x: x + torch.empty_like(x).random_(5),
    "randperm": lambda x: x[:, torch.randperm(x.shape[1])],
    "rsample": lambda x: distributions.Laplace(x, 0.5).rsample() + distributions.Uniform(x, x + 1).rsample(),
    "selected": lambda x: x.flatten(0, 1)[torch.rand(x.shape[0] * x.shape[1]) < 0.5].sum(0) / (x.shape[0] * x.shape[1]),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1.0, 3.0),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_distribution_is_proven_and_is_the_one_of_the_model(name, tmp_path):
    model = Drawing(DRAWS[name]).eval()
    onnx_model = as_onnx(model, tmp_path, *CALLS)
    report = onnx_model.verify()
    assert report.ok, report
    assert "draws random numbers" in str(report)
    x = torch.randn(4000, 50, 4)
    with torch.no_grad():
        expected, got = (torch.stack([run(x) for _ in range(2)]) for run in (model, onnx_model))
    assert not torch.equal(got[0], got[1])
    assert expected.shape[2:] == got.shape[2:]
    for measure in (torch.mean, torch.std):
        torch.testing.assert_close(measure(got), measure(expected), rtol=0.1, atol=0.1)


def test_without_the_option_such_a_model_is_not_proven(tmp_path):
    report = as_onnx(Drawing(DRAWS["normal_"]).eval(), tmp_path, *CALLS, random_numbers=False).verify()
    assert not report.ok
    assert "export(..., random_numbers=True)" in str(report)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_numbers_of_other_dtypes(dtype, tmp_path):
    model = Drawing(lambda x: x * torch.rand_like(x) + torch.randn_like(x)).eval().to(dtype)
    assert as_onnx(model, tmp_path, *((x.to(dtype),) for (x,) in CALLS)).verify().ok


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.GRUCell(4, 4)

    def forward(self, x):
        state, states = torch.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step] + torch.randn_like(state), state)
            states.append(state)
        return torch.stack(states, 1)


def test_numbers_in_a_loop(tmp_path):
    onnx_model = as_onnx(Recurrent().eval(), tmp_path, *CALLS)
    assert onnx_model.verify().ok
    x = torch.zeros(1, 40, 4)
    assert onnx_model(x).diff(dim=1).abs().amin((0, 2)).min() > 0  # new numbers in each step


def test_a_batch_that_never_varied_is_found(tmp_path):
    model = Drawing(DRAWS["normal_"]).eval()
    onnx_model = as_onnx(model, tmp_path, *((x[:1],) for (x,) in CALLS))
    assert onnx_model.verify().ok
    assert onnx_model(torch.randn(5, 7, 4)).shape == (5, 7, 4)


def test_a_graph_with_another_distribution_is_not_proven(tmp_path):
    onnx_model = as_onnx(Drawing(lambda x: x + torch.randn_like(x)).eval(), tmp_path, *CALLS)
    assert onnx_model.verify().ok
    file = onnx.load(onnx_model.path, load_external_data=False)
    (node,) = (node for node in file.graph.node if node.op_type == "RandomNormalLike")
    (scale,) = (attribute for attribute in node.attribute if attribute.name == "scale")
    scale.f = 1.1
    onnx.save(file, onnx_model.path)
    onnx_model.graph.close_if_changed()
    report = onnx_model.verify()
    assert not report.ok
    assert "differs" in str(report)


def test_two_draws_stay_two_in_the_graph(tmp_path):
    model = Drawing(lambda x: x + torch.randn_like(x) - torch.randn_like(x)).eval()
    onnx_model = as_onnx(model, tmp_path, *CALLS)
    assert onnx_model.verify().ok
    x = torch.randn(100, 50, 4)
    assert float((onnx_model(x) - model.layer(x)).std()) == pytest.approx(2**0.5, rel=0.05)


def test_the_module_is_named_where_a_wrong_result_begins(tmp_path):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.second(self.first(x + torch.randn_like(x)) * torch.rand_like(x))

    model = Two().eval()
    onnx_model = as_onnx(model, tmp_path, *CALLS)
    with torch.no_grad():
        model.second.weight.mul_(1.5)
    report = onnx_model.verify()
    assert not report.ok
    assert report.locate().module == "second"


def seeded(x):
    torch.manual_seed(0)
    return x + torch.randn_like(x)


def with_seeded_generator(x):
    return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(0))


def seeded_apart(x):
    with torch.random.fork_rng():
        return seeded(x)


def seeded_later(x):
    return seeded(x * torch.rand_like(x))


@pytest.mark.parametrize("draw", [seeded, with_seeded_generator, seeded_apart, seeded_later])
def test_numbers_that_the_model_seeds_itself_are_not_random(draw, tmp_path):
    assert not as_onnx(Drawing(draw).eval(), tmp_path, *CALLS).verify().ok


def test_a_seed_is_noticed_where_torch_had_it_already():
    torch.manual_seed(0)
    numbers = torch.rand(4)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    with fixed_numbers(3):
        assert not torch.equal(torch.rand(4), numbers)
        torch.manual_seed(0)
        assert torch.equal(torch.rand(4), numbers)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_is_an_argument(tmp_path):
    class Noisy(torch.nn.Module):
        def forward(self, x, generator=None):
            return x + torch.randn(x.shape, generator=generator) + torch.empty_like(x).normal_(generator=generator)

    generator = torch.Generator().manual_seed(0)
    onnx_model = as_onnx(Noisy(), tmp_path, *((*call, generator) for call in CALLS))
    assert onnx_model.verify().ok


def one_of_two(x):
    if torch.rand(()) < 0.5:
        return x * 2
    return x - 1


def one_of_many(x):
    for factor in (2, 3, 5, 7, 11):
        if torch.rand(()) < 0.5:
            x = x * factor
    return x


def test_a_graph_goes_both_ways_by_chance(tmp_path):
    onnx_model = as_onnx(Drawing(one_of_two).eval(), tmp_path, *CALLS)
    assert onnx_model.verify().ok
    x = torch.randn(2, 5, 4)
    assert len({float(onnx_model(x).sum()) for _ in range(40)}) == 2


def test_a_graph_that_would_refuse_calls_by_chance_is_not_made(tmp_path):
    with pytest.raises(ExportError, match="branches on random numbers") as raised:
        as_onnx(Drawing(one_of_many).eval(), tmp_path, *CALLS)
    assert "test_random_numbers.py" in str(raised.value)


def test_generators_are_left_as_they_are(tmp_path):
    model, observer = Drawing(DRAWS["normal_"]).eval(), exportkit.InputObserver()
    torch.manual_seed(1)
    with torch.no_grad():
        expected = [model(*call) for call in CALLS]
    torch.manual_seed(1)
    with torch.no_grad(), observer(model):
        got = [model(*call) for call in CALLS]
    assert all(map(torch.equal, got, expected))
    state = torch.get_rng_state()
    assert exportkit.export(model, observer, random_numbers=True).to_onnx(tmp_path / "model.onnx").verify().ok
    assert torch.equal(torch.get_rng_state(), state)


def test_a_saved_folder_is_proven_without_the_model(tmp_path):
    model, observer = Drawing(DRAWS["normal_"]).eval(), exportkit.InputObserver()
    with torch.no_grad(), observer(model):
        for call in CALLS:
            model(*call)
    observer.observation.save(tmp_path / "calls")
    observation = exportkit.Observation.load(tmp_path / "calls")
    exportkit.export(model, observation, random_numbers=True).save(tmp_path / "saved")
    loaded = exportkit.load(tmp_path / "saved")
    assert loaded.verify().ok
    with pytest.raises(ExportkitError, match="drew random numbers"):
        loaded.verify(data=observer)
