"""Models that compute gradients, such as forces from an energy: they are part of the graph."""

import pytest
import torch

import exportkit


class Energy(torch.nn.Module):
    """An energy of atoms with edges between them, as models of molecules compute it."""

    def __init__(self):
        super().__init__()
        self.kinds = torch.nn.Embedding(10, 8)
        self.filters = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.SiLU(), torch.nn.Linear(8, 8))
        self.last = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4), torch.nn.Softplus())
        self.register_buffer("centres", torch.linspace(0, 3, 4))

    def energy(self, kinds, positions, edges):
        first, second = edges[0], edges[1]
        distances = (positions[first] - positions[second]).norm(dim=-1)
        features = torch.exp(-((distances[:, None] - self.centres) ** 2)) * torch.cos(distances / 5)[:, None]
        atoms = self.kinds(kinds)
        messages = atoms[second] * self.filters(features)
        atoms = atoms + torch.zeros_like(atoms).index_add(0, first, messages)
        return self.last(atoms).sum()


class Forces(Energy):
    def forward(self, kinds, positions, edges):
        positions.requires_grad_(True)
        energy = self.energy(kinds, positions, edges)
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=self.training)
        return {"energy": energy, "forces": -gradient}


class ForcesAlone(Energy):
    """Leaves it to its caller to let torch record gradients, and returns nothing that needs one."""

    def forward(self, kinds, positions, edges):
        positions = positions.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.energy(kinds, positions, edges), positions)
        return {"forces": -gradient}


class ForcesUnderNoGrad(Energy):
    def forward(self, kinds, positions, edges):
        with torch.enable_grad():
            positions = positions.detach().requires_grad_(True)
            energy = self.energy(kinds, positions, edges)
            energy.backward()  # adds to the gradients of parameters, too
        return {"energy": energy.detach(), "forces": -positions.grad}


class ForcesOfFunction(Energy):
    def forward(self, kinds, positions, edges):
        gradient, energy = torch.func.grad_and_value(lambda places: self.energy(kinds, places, edges))(positions)
        return {"energy": energy, "forces": -gradient}


def atoms(count):
    places = torch.arange(count)
    edges = torch.stack([places, (places + 1) % count])
    return torch.randint(0, 10, (count,)), torch.randn(count, 3), torch.cat([edges, edges.flip(0)], 1)


@pytest.mark.runtime
@pytest.mark.parametrize(
    ("make", "mode"),
    [
        (Forces, torch.enable_grad),
        (ForcesAlone, torch.enable_grad),
        (ForcesUnderNoGrad, torch.no_grad),
        (ForcesOfFunction, torch.no_grad),
        (ForcesOfFunction, torch.enable_grad),
    ],
)
def test_forces_are_computed_in_the_graph(make, mode, tmp_path):
    torch.manual_seed(0)
    model, observer = make().eval(), exportkit.InputObserver()
    with observer(model), mode():
        for count in (5, 7):
            model(*atoms(count))
    own = {
        name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()
    }
    exported = exportkit.export(model, observer)
    onnx_model = exported.to_onnx(tmp_path / "model.onnx")
    assert onnx_model.verify().ok
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert parameter.grad is own[name] is None or torch.equal(parameter.grad, own[name])
    given = atoms(11)
    with mode():
        expected = model(*(tensor.clone() for tensor in given))
    for name, tensor in onnx_model(*given).items():
        torch.testing.assert_close(tensor, expected[name].detach(), rtol=1e-3, atol=1e-4)
