"""Proteins, neural operators, equivariant networks, normalising flows, and policies of reinforcement learning."""

import argparse
from dataclasses import replace

import torch
from cases import CASES, Case, case, images, randn
from torch import nn

ROWS, MORE_ROWS = [(2,), (3,)], [(1,), (7,)]
TOKENS, MORE_TOKENS = [(2, 8), (3, 12)], [(1, 10), (4, 16)]


def _amino_acids(*shape):
    return torch.randint(4, 24, shape)


@case(TOKENS, MORE_TOKENS)
def esm2():
    import esm

    model = esm.model.esm2.ESM2(num_layers=2, embed_dim=32, attention_heads=4, alphabet="ESM-1b")

    def use(batch, length):
        tokens = _amino_acids(batch, length)
        tokens[-1, -2:] = 1
        model(tokens, repr_layers=[1, 2])

    return model, use


@case(TOKENS, MORE_TOKENS)
def contacts_of_esm2():
    import esm

    model = esm.model.esm2.ESM2(num_layers=2, embed_dim=32, attention_heads=4, alphabet="ESM-1b")

    def use(batch, length):
        tokens = _amino_acids(batch, length)
        tokens[:, 0], tokens[:, -1] = 0, 2
        model(tokens, repr_layers=[2], return_contacts=True)

    return model, use


@case([(2, 3, 8), (1, 4, 10)], [(1, 5, 12), (2, 2, 9)])
def alignments_of_esm():
    import esm

    alphabet = esm.data.Alphabet.from_architecture("MSA Transformer")
    options = argparse.Namespace(
        arch="msa_transformer", layers=2, num_layers=2, embed_dim=32, attention_heads=4, ffn_embed_dim=64,
        embed_positions_msa=True, embed_positions_msa_dim=32, max_tokens=2**14, max_tokens_per_msa=2**14,
        max_positions=64, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, logit_bias=False,
    )  # fmt: skip
    model = esm.model.msa_transformer.MSATransformer(options, alphabet)
    return model, lambda batch, rows, length: model(_amino_acids(batch, rows, length), repr_layers=[2])


def _neural_operator(name, kind, recorded, truth, **options):
    def make():
        from neuralop import models

        model = getattr(models, kind)(in_channels=3, out_channels=1, hidden_channels=8, n_layers=2, **options)
        return model, lambda batch, side: model(images(batch, side))

    CASES.append(Case(name, "science", make, recorded, truth))


_neural_operator("Fourier neural operator", "FNO", [(2, 16), (3, 16)], [(1, 16), (5, 16)], n_modes=(4, 4))
_neural_operator("Fourier neural operator, any size", "FNO", [(2, 16), (3, 24)], [(1, 32), (5, 20)], n_modes=(4, 4))
_neural_operator("tensorised operator", "TFNO", [(2, 16), (3, 16)], [(1, 16), (5, 16)], n_modes=(4, 4), rank=0.5)


@case([(5, 12), (7, 20)], [(4, 9), (9, 30)])
def equivariant_points():
    from e3nn import o3
    from e3nn.math import soft_one_hot_linspace
    from e3nn.nn import FullyConnectedNet

    class Points(nn.Module):
        def __init__(self):
            super().__init__()
            self.harmonics = o3.Irreps.spherical_harmonics(2)
            self.product = o3.FullyConnectedTensorProduct("4x0e", self.harmonics, "2x0e + 2x1o", shared_weights=False)
            self.weights = FullyConnectedNet([8, 16, self.product.weight_numel], torch.relu)

        def forward(self, x, positions, source, target):
            apart = positions[source] - positions[target]
            directions = o3.spherical_harmonics(self.harmonics, apart, True, normalization="component")
            near = soft_one_hot_linspace(apart.norm(dim=1), 0.0, 3.0, 8, basis="smooth_finite", cutoff=True)
            messages = self.product(x[source], directions, self.weights(near.mul(8**0.5)))
            return torch.zeros(len(x), messages.shape[1]).index_add_(0, target, messages)

    model = Points()

    def use(points, edges):
        model(randn(points, 4), randn(points, 3), *torch.randint(0, points, (2, edges)))

    return model, use


class _Likelihood(nn.Module):
    def __init__(self, flow):
        super().__init__()
        self.flow = flow

    def forward(self, x, context):
        return self.flow(context).log_prob(x)


def _of_zuko(name, **options):
    def make():
        import zuko

        model = _Likelihood(getattr(zuko.flows, name)(4, 3, **options))
        return model, lambda rows: model(randn(rows, 4), randn(rows, 3))

    CASES.append(Case(f"{name} of zuko", "flows", make, ROWS, MORE_ROWS))


_of_zuko("GMM", components=3)
for _name in ("NSF", "MAF", "NICE", "SOSPF", "BPF"):
    _of_zuko(_name, transforms=2, hidden_features=[16])


def _likelihood(make):
    CASES[-1] = replace(CASES[-1], method="log_prob", family="flows")
    return make


@_likelihood
@case(ROWS, MORE_ROWS)
def splines_of_nflows():
    from nflows import distributions, flows, transforms

    spline = transforms.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(4, 16, tails="linear", tail_bound=3.0)
    steps = transforms.CompositeTransform([transforms.ReversePermutation(4), spline])
    model = flows.Flow(steps, distributions.StandardNormal([4]))
    return model, lambda rows: model.log_prob(randn(rows, 4))


@_likelihood
@case(ROWS, MORE_ROWS)
def coupling_of_nflows():
    from nflows import distributions, flows, transforms
    from nflows.nn.nets import ResidualNet

    coupling = transforms.AffineCouplingTransform(torch.tensor([1, 0, 1, 0]), lambda i, o: ResidualNet(i, o, 16))
    steps = transforms.CompositeTransform([coupling, transforms.LULinear(4), transforms.BatchNorm(4)])
    model = flows.Flow(steps, distributions.StandardNormal([4]))
    return model, lambda rows: model.log_prob(randn(rows, 4))


def _policy(name, method, make):
    CASES.append(Case(name, "policies", make, ROWS, MORE_ROWS, method=method))


def _actor_critic(actions, method="forward"):
    def make():
        import gymnasium
        from stable_baselines3.common.policies import ActorCriticPolicy

        spaces = gymnasium.spaces
        space = spaces.Discrete(4) if actions == "discrete" else spaces.Box(-1, 1, (3,))
        model = ActorCriticPolicy(spaces.Box(-1, 1, (6,)), space, lambda _: 1e-3)
        if method == "forward":
            return model, lambda rows: model(randn(rows, 6), deterministic=True)
        return model, lambda rows: model.evaluate_actions(randn(rows, 6), randn(rows, 3))

    return make


_policy("actor and critic", "forward", _actor_critic("discrete"))
_policy("actor and critic, continuous actions", "forward", _actor_critic("continuous"))
_policy("actions judged", "evaluate_actions", _actor_critic("continuous", "evaluate_actions"))


def _q_network():
    import gymnasium
    from stable_baselines3.dqn.policies import DQNPolicy

    spaces = gymnasium.spaces
    model = DQNPolicy(spaces.Box(-1, 1, (6,)), spaces.Discrete(4), lambda _: 1e-3)
    return model, lambda rows: model(randn(rows, 6))


_policy("Q network", "forward", _q_network)
