"""Research code: mixtures of experts, flows, differential equations, retrieval, generators, variants of attention."""

import itertools
import math

import torch
from cases import case, images, ints, randn
from torch import nn
from torch.nn import functional as F

ROWS, MORE_ROWS = [(2,), (5,)], [(1,), (9,)]
STEPS, MORE_STEPS = [(2, 5), (3, 8)], [(1, 6), (4, 13)]
IMAGES, MORE_IMAGES = [(2, 16), (3, 32)], [(1, 24), (2, 48)]


class Function(nn.Module):
    """A module that calls a function with its parameters and inputs."""

    def __init__(self, function, **parameters):
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_module(name, value) if isinstance(value, nn.Module) else self.register_parameter(
                name, nn.Parameter(value)
            )

    def forward(self, *inputs):
        return self.function(self, *inputs)


def _mlp(*widths):
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.SiLU())]
    return nn.Sequential(*layers[:-1])


@case(STEPS, MORE_STEPS)
def top_two_experts():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(8, 4), nn.ModuleList(_mlp(8, 16, 8) for _ in range(4))

        def forward(self, x):
            weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
            result = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                share = (weights * (chosen == index)).sum(-1, keepdim=True)
                result = result + share * expert(x)
            return result

    model = Experts()
    return model, lambda batch, steps: model(randn(batch, steps, 8))


@case(STEPS, MORE_STEPS)
def experts_by_index():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(8, 4), nn.ModuleList(_mlp(8, 16, 8) for _ in range(4))

        def forward(self, x):
            flat = x.reshape(-1, 8)
            weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
            result = torch.zeros_like(flat)
            for index, expert in enumerate(self.experts):
                rows, slot = torch.where(chosen == index)
                result.index_add_(0, rows, expert(flat[rows]) * weights[rows, slot, None])
            return result.reshape(x.shape)

    model = Experts()
    return model, lambda batch, steps: model(randn(batch, steps, 8))


@case(STEPS, MORE_STEPS)
def stacked_experts():
    def forward(self, x):
        gates = self.router(x).softmax(-1)
        hidden = torch.einsum("bsd,edh->bseh", x, self.up).relu()
        return torch.einsum("bseh,ehd,bse->bsd", hidden, self.down, gates)

    model = Function(forward, router=nn.Linear(8, 4), up=randn(4, 8, 16), down=randn(4, 16, 8))
    return model, lambda batch, steps: model(randn(batch, steps, 8))


@case(ROWS, MORE_ROWS)
def affine_coupling_flow():
    class Coupling(nn.Module):
        def __init__(self, flip):
            super().__init__()
            self.net, self.flip = _mlp(3, 16, 6), flip

        def forward(self, x, log_det):
            a, b = x.chunk(2, -1)[:: -1 if self.flip else 1]
            scale, shift = self.net(a).chunk(2, -1)
            b = b * scale.tanh().exp() + shift
            return torch.cat([b, a] if self.flip else [a, b], -1), log_det + scale.tanh().sum(-1)

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleList(Coupling(bool(index % 2)) for index in range(4))

        def forward(self, x):
            log_det = x.new_zeros(x.shape[0])
            for step in self.steps:
                x, log_det = step(x, log_det)
            return x, log_det - 0.5 * (x.square().sum(-1) + x.shape[-1] * math.log(2 * math.pi))

    model = Flow()
    return model, lambda batch: model(randn(batch, 6))


@case(ROWS, MORE_ROWS)
def spline_inside_an_interval():
    class Spline(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = _mlp(3, 16, 3 * 5)

        def forward(self, x):
            a, b = x.chunk(2, -1)
            heights = self.net(a).reshape(-1, 3, 5).softmax(-1)
            inside = (b >= -3) & (b <= 3)
            made, log_det = b.clone(), torch.zeros_like(b)
            if torch.any(inside):
                place = (b[inside] + 3) / 6 * 5
                piece = place.long().clamp(max=4)[:, None]
                rise = heights[inside].gather(-1, piece)[:, 0]
                before = F.pad(heights[inside].cumsum(-1), (1, 0)).gather(-1, piece)[:, 0]
                made[inside] = (before + rise * (place - piece[:, 0])) * 6 - 3
                log_det[inside] = (rise * 5).log()
            return torch.cat([a, made], -1), log_det.sum(-1)

    model = Spline()
    return model, lambda batch: model(randn(batch, 6))


@case(ROWS, MORE_ROWS)
def masked_autoregressive_flow():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 12)
            order, hidden = torch.arange(6), torch.arange(16) % 5
            self.register_buffer("seen", (hidden[:, None] >= order).float())
            self.register_buffer("given", (order[:, None] > hidden).float().repeat(2, 1))

        def forward(self, x):
            hidden = F.linear(x, self.first.weight * self.seen, self.first.bias).tanh()
            shift, scale = F.linear(hidden, self.second.weight * self.given, self.second.bias).chunk(2, -1)
            scale = F.softplus(scale) + 1e-3
            return x * scale + shift, scale.log().sum(-1)

    model = Masked()
    return model, lambda batch: model(randn(batch, 6))


@case(ROWS, MORE_ROWS)
def runge_kutta_steps():
    def forward(self, state, time):
        step = time / 4
        for _ in range(4):
            k1 = self.field(state)
            k2 = self.field(state + step / 2 * k1)
            k3 = self.field(state + step / 2 * k2)
            k4 = self.field(state + step * k3)
            state = state + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return state

    model = Function(forward, field=_mlp(6, 16, 6))
    return model, lambda batch: model(randn(batch, 6), torch.rand(batch, 1))


@case(ROWS, MORE_ROWS)
def neural_ode_on_a_grid_of_times():
    class Ode(nn.Module):
        def __init__(self):
            super().__init__()
            self.field = _mlp(6, 16, 6)
            self.register_buffer("times", torch.linspace(0, 1, 5))

        def forward(self, state):
            steps = self.times.diff()
            assert (steps > 0).all() or (steps < 0).all(), "times have to rise or fall"
            states = [state]
            for step in steps:
                middle = states[-1] + step / 2 * self.field(states[-1])
                states.append(states[-1] + step * self.field(middle))
            return torch.stack(states)

    model = Ode()
    return model, lambda batch: model(randn(batch, 6))


@case([(2, 7), (3, 11)], [(1, 9), (4, 30)])
def nearest_neighbours():
    def forward(_, queries, keys, values):
        distances, found = torch.cdist(queries, keys).topk(3, dim=-1, largest=False)
        weights = (-distances).softmax(-1)
        near = values.gather(1, found.flatten(1)[..., None].expand(-1, -1, values.shape[-1]))
        return (weights.unsqueeze(-1) * near.unflatten(1, found.shape[1:])).sum(2)

    model = Function(forward)
    return model, lambda batch, points: model(randn(batch, 5, 4), randn(batch, points, 4), randn(batch, points, 6))


@case([(2, 20), (3, 30)], [(1, 25), (4, 60)])
def points_with_farthest_sampling():
    def forward(self, points):
        batch = points.shape[0]
        rows = torch.arange(batch)
        distance = points.new_full(points.shape[:2], 1e10)
        current, chosen = torch.zeros(batch, dtype=torch.long), []
        for _ in range(4):
            chosen.append(current)
            centre = points[rows, current].unsqueeze(1)
            distance = torch.minimum(distance, (points - centre).square().sum(-1))
            current = distance.argmax(-1)
        centres = points[rows.unsqueeze(1), torch.stack(chosen, 1)]
        groups = torch.cdist(centres, points).topk(6, largest=False).indices
        local = points[rows.view(-1, 1, 1), groups] - centres.unsqueeze(2)
        return self.net(local).amax(2)

    model = Function(forward, net=_mlp(3, 16, 8))
    return model, lambda batch, points: model(randn(batch, points, 3))


@case([(2, 20), (3, 30)], [(1, 25), (4, 60)])
def point_net():
    def forward(self, points):
        angles = self.align(points).amax(1).view(-1, 3, 3)
        return self.head(self.net(points @ angles).amax(1)).log_softmax(-1)

    model = Function(forward, align=_mlp(3, 16, 9), net=_mlp(3, 16, 32), head=nn.Linear(32, 5))
    return model, lambda batch, points: model(randn(batch, points, 3))


@case([(4, 10), (7, 20)], [(1, 15), (9, 50)])
def retrieval_with_scores():
    def forward(self, queries, documents):
        scores = F.normalize(self.query(queries), dim=-1) @ F.normalize(self.document(documents), dim=-1).T
        return scores.topk(5, dim=-1)

    model = Function(forward, query=nn.Linear(8, 8), document=nn.Linear(8, 8))
    return model, lambda queries, documents: model(randn(queries, 8), randn(documents, 8))


@case(ROWS, MORE_ROWS)
def generator_of_images():
    layers = [nn.ConvTranspose2d(16, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh()]
    model = nn.Sequential(nn.Unflatten(1, (16, 1, 1)), *layers)
    return model, lambda batch: model(randn(batch, 16))


@case(ROWS, MORE_ROWS)
def generator_with_styles():
    class Styled(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.style, self.weight = (
                nn.Parameter(randn(1, 8, 4, 4)),
                nn.Linear(16, 8),
                nn.Parameter(randn(8, 8, 3, 3)),
            )

        def forward(self, z):
            batch = z.shape[0]
            weight = self.weight * self.style(z)[:, None, :, None, None]
            weight = weight * weight.square().sum((2, 3, 4), keepdim=True).add(1e-8).rsqrt()
            x = F.interpolate(self.start.expand(batch, -1, -1, -1), scale_factor=2, mode="bilinear")
            x = F.conv2d(x.reshape(1, -1, 8, 8), weight.flatten(0, 1), padding=1, groups=batch)
            return F.leaky_relu(x.reshape(batch, 8, 8, 8), 0.2)

    model = Styled()
    return model, lambda batch: model(randn(batch, 16))


@case(IMAGES, MORE_IMAGES)
def discriminator_with_patches():
    from torch.nn.utils.parametrizations import spectral_norm

    layers = [
        spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)),
        nn.LeakyReLU(0.2),
        nn.Conv2d(8, 8, 4, 2, 1),
        nn.InstanceNorm2d(8),
    ]
    model = nn.Sequential(*layers, nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 3, 1, 1))
    return model, lambda batch, side: model(images(batch, side))


@case(ROWS, MORE_ROWS)
def variational_autoencoder():
    class Variational(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = _mlp(12, 16, 8), _mlp(4, 16, 12)

        def forward(self, x):
            mean, log_variance = self.encoder(x).chunk(2, -1)
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
            return {"x": self.decoder(mean), "mean": mean, "divergence": divergence}

    model = Variational()
    return model, lambda batch: model(randn(batch, 12))


@case(STEPS, MORE_STEPS)
def vector_quantisation():
    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", randn(16, 8))
            self.register_buffer("is_initialised", torch.tensor(True))

        def forward(self, x):
            if not self.is_initialised:
                self.codes.copy_(x.flatten(0, 1)[:16])
            index = torch.cdist(x, self.codes.expand(x.shape[0], -1, -1)).argmin(-1)
            found = F.embedding(index, self.codes)
            return x + (found - x).detach(), index, F.mse_loss(found, x)

    model = Codebook()
    return model, lambda batch, steps: model(randn(batch, steps, 8))


@case(STEPS, MORE_STEPS)
def residual_quantisation():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.books = nn.Parameter(randn(3, 16, 8))

        def forward(self, x):
            codes, total, rest = [], torch.zeros_like(x), x
            for book in self.books:
                index = (rest.unsqueeze(-2) - book).square().sum(-1).argmin(-1)
                found = F.embedding(index, book)
                codes.append(index)
                total, rest = total + found, rest - found
            return total, torch.stack(codes, -1)

    model = Residual()
    return model, lambda batch, steps: model(randn(batch, steps, 8))


@case(STEPS, MORE_STEPS)
def linear_attention():
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        context = torch.einsum("bhsd,bhse->bhde", k, v)
        norm = 1 / (torch.einsum("bhsd,bhd->bhs", q, k.sum(2)) + 1e-6)
        return self.out(torch.einsum("bhsd,bhde,bhs->bshe", q, context, norm).flatten(-2))

    model = Function(forward, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8))
    return model, lambda batch, steps: model(randn(batch, steps, 8))


@case([(2, 8), (3, 16)], [(1, 12), (4, 24)])
def attention_in_windows():
    def forward(self, x):
        batch, steps, width = x.shape
        windows = x.reshape(batch * (steps // 4), 4, width)
        q, k, v = self.qkv(windows).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v).reshape(batch, steps, width)

    model = Function(forward, qkv=nn.Linear(8, 24))
    return model, lambda batch, steps: model(randn(batch, steps, 8))


@case(STEPS, MORE_STEPS)
def attention_with_relative_positions():
    def forward(self, x):
        steps = x.shape[1]
        positions = torch.arange(steps)
        bias = self.table((positions[:, None] - positions[None]).clamp(-4, 4) + 4).permute(2, 0, 1)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / 2 + bias).masked_fill(torch.ones(steps, steps).triu(1).bool(), -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    model = Function(forward, qkv=nn.Linear(8, 24), table=nn.Embedding(9, 2))
    return model, lambda batch, steps: model(randn(batch, steps, 8))


@case(STEPS, MORE_STEPS)
def transformer_encoder_with_padding():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)

    def use(batch, steps):
        lengths = torch.tensor([steps, *[max(1, steps - 2)] * (batch - 1)])
        model(randn(batch, steps, 8), src_key_padding_mask=torch.arange(steps)[None] >= lengths[:, None])

    return model, use


@case([(2, 5, 4), (3, 8, 6)], [(1, 6, 3), (4, 11, 9)])
def transformer_of_torch():
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    causal = nn.Transformer.generate_square_subsequent_mask
    return model, lambda batch, source, target: model(
        randn(batch, source, 8), randn(batch, target, 8), tgt_mask=causal(target), tgt_is_causal=True
    )


@case(STEPS, MORE_STEPS)
def multi_head_attention_with_weights():
    model = nn.MultiheadAttention(8, 2, batch_first=True)

    def use(batch, steps):
        x = randn(batch, steps, 8)
        model(x, x, x)

    return model, use


@case([(2, 16), (3, 24)], [(1, 32), (4, 40)])
def mixer_of_frequencies():
    def forward(self, x):
        spectrum = torch.fft.rfft(x, dim=1)
        kept = torch.zeros_like(spectrum)
        kept[:, :4] = torch.einsum("bmi,mio->bmo", spectrum[:, :4], torch.view_as_complex(self.weight))
        return torch.fft.irfft(kept, n=x.shape[1], dim=1) + self.skip(x)

    model = Function(forward, weight=randn(4, 6, 6, 2), skip=nn.Linear(6, 6))
    return model, lambda batch, steps: model(randn(batch, steps, 6))


@case(STEPS, MORE_STEPS)
def rotary_with_complex_numbers():
    def forward(self, x):
        turns = torch.outer(torch.arange(x.shape[1]), 1.0 / 100 ** (torch.arange(0, 8, 2) / 8))
        rotated = torch.view_as_complex(x.reshape(*x.shape[:-1], 4, 2)) * torch.polar(torch.ones_like(turns), turns)
        return self.net(torch.view_as_real(rotated).flatten(2))

    model = Function(forward, net=nn.Linear(8, 8))
    return model, lambda batch, steps: model(randn(batch, steps, 8))


@case(STEPS, MORE_STEPS)
def state_space_scan():
    def forward(self, x):
        a, b = self.decay.sigmoid(), self.inp(x)
        powers = torch.arange(x.shape[1])
        kernel = a ** (powers[:, None, None] - powers[None, :, None]).clamp(min=0)
        kernel = torch.where((powers[:, None] >= powers[None])[..., None], kernel, 0.0)
        return self.out(torch.einsum("tsd,bsd->btd", kernel, b))

    model = Function(forward, decay=randn(8), inp=nn.Linear(6, 8), out=nn.Linear(8, 6))
    return model, lambda batch, steps: model(randn(batch, steps, 6))


@case([(2, 5), (3, 8)], [(1, 6), (4, 11)])
def hyper_network():
    def forward(self, x, task):
        weight = self.hyper(task).view(-1, 6, 6)
        return torch.bmm(x, weight).relu()

    model = Function(forward, hyper=_mlp(4, 16, 36))
    return model, lambda batch, steps: model(randn(batch, steps, 6), randn(batch, 4))


@case(IMAGES, MORE_IMAGES)
def neural_cellular_automaton():
    def forward(self, x):
        for _ in range(3):
            alive = F.max_pool2d(x[:, :1], 3, 1, 1) > 0.1
            x = (x + self.rule(F.pad(x, (1, 1, 1, 1), mode="circular"))) * alive
        return x

    model = Function(forward, rule=nn.Conv2d(3, 3, 3))
    return model, lambda batch, side: model(images(batch, side))


@case([(2, 8), (3, 12)], [(1, 10), (4, 20)])
def radiance_field():
    def forward(self, points, directions, depths):
        waves = torch.cat([points * 2**level for level in range(3)], -1)
        found = self.net(torch.cat([waves.sin(), waves.cos(), directions.unsqueeze(1).expand_as(points)], -1))
        density, colour = found[..., 0].relu(), found[..., 1:].sigmoid()
        steps = torch.cat([depths[:, 1:] - depths[:, :-1], torch.full_like(depths[:, :1], 1e10)], -1)
        alpha = 1 - (-density * steps).exp()
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return ((alpha * through).unsqueeze(-1) * colour).sum(1)

    model = Function(forward, net=_mlp(21, 16, 4))
    return model, lambda rays, steps: model(
        randn(rays, steps, 3), F.normalize(randn(rays, 3), dim=-1), torch.rand(rays, steps).sort(-1).values
    )


@case([(2, 12), (3, 20)], [(1, 16), (4, 32)])
def slot_attention():
    def forward(self, x):
        slots = self.start.expand(x.shape[0], -1, -1)
        keys, values = self.kv(x).chunk(2, -1)
        for _ in range(3):
            weights = (keys @ self.q(slots).transpose(1, 2) / 8**0.5).softmax(-1) + 1e-8
            update = (weights / weights.sum(1, keepdim=True)).transpose(1, 2) @ values
            slots = self.cell(update.reshape(-1, 8), slots.reshape(-1, 8)).view_as(slots)
        return slots

    model = Function(forward, start=randn(1, 4, 8), kv=nn.Linear(8, 16), q=nn.Linear(8, 8), cell=nn.GRUCell(8, 8))
    return model, lambda batch, tokens: model(randn(batch, tokens, 8))


@case([(2, 4, 6), (3, 7, 5)], [(1, 5, 8), (4, 9, 3)])
def alignment_by_dynamic_programming():
    def forward(self, a, b):
        cost = torch.cdist(self.net(a), self.net(b))
        return (-cost).softmax(1) * (-cost).softmax(2), cost.flatten(1).argmin(-1)

    model = Function(forward, net=nn.Linear(4, 8))
    return model, lambda batch, a, b: model(randn(batch, a, 4), randn(batch, b, 4))


@case(STEPS, MORE_STEPS)
def conditional_random_field():
    def forward(self, tokens):
        scores = self.emit(self.words(tokens))
        best, back = scores[:, 0], []
        for step in range(1, tokens.shape[1]):
            found = (best.unsqueeze(2) + self.moves).max(1)
            back.append(found.indices)
            best = found.values + scores[:, step]
        return best.logsumexp(-1), torch.stack(back, 1)

    model = Function(forward, words=nn.Embedding(50, 8), emit=nn.Linear(8, 4), moves=randn(4, 4))
    return model, lambda batch, steps: model(ints(batch, steps))
