"""Recurrent networks, packed sequences among them."""

import torch
from cases import case, ints, randn
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

STEPS, MORE_STEPS = [(2, 5), (3, 8)], [(1, 6), (4, 11), (2, 3)]


def _lengths(batch, steps):
    return torch.tensor([steps, *torch.randint(1, steps + 1, (batch - 1,)).sort(descending=True).values.tolist()])


class Packed(nn.Module):
    def __init__(self, layer, **how):
        super().__init__()
        self.words, self.layer, self.how = nn.Embedding(50, 8), layer, how
        self.head = nn.Linear(layer.hidden_size * (2 if layer.bidirectional else 1), 4)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.words(tokens), lengths, batch_first=True, **self.how)
        states, _ = self.layer(packed)
        return self.head(pad_packed_sequence(states, batch_first=True)[0])


@case(STEPS, MORE_STEPS)
def lstm_tagger():
    model = nn.LSTM(6, 8, num_layers=2, batch_first=True)
    return model, lambda batch, steps: model(randn(batch, steps, 6))


@case(STEPS, MORE_STEPS)
def gru_with_state():
    model = nn.GRU(6, 8, batch_first=True)
    return model, lambda batch, steps: model(randn(batch, steps, 6), randn(1, batch, 8))


@case(STEPS, MORE_STEPS)
def packed_lstm():
    model = Packed(nn.LSTM(8, 8, batch_first=True))
    return model, lambda batch, steps: model(ints(batch, steps), _lengths(batch, steps))


@case(STEPS, MORE_STEPS)
def packed_gru_both_ways():
    model = Packed(nn.GRU(8, 8, batch_first=True, bidirectional=True))
    return model, lambda batch, steps: model(ints(batch, steps), _lengths(batch, steps))


@case(STEPS, MORE_STEPS)
def packed_lstm_unsorted():
    model = Packed(nn.LSTM(8, 8, batch_first=True), enforce_sorted=False)
    return model, lambda batch, steps: model(ints(batch, steps), _lengths(batch, steps).flip(0))


@case(STEPS, MORE_STEPS)
def packed_classifier():
    class LastState(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.layer, self.head = nn.Embedding(50, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, tokens, lengths):
            packed = pack_padded_sequence(self.words(tokens), lengths.cpu(), batch_first=True)
            return self.head(self.layer(packed)[1][0][-1])

    model = LastState()
    return model, lambda batch, steps: model(ints(batch, steps), _lengths(batch, steps))


@case(STEPS, MORE_STEPS)
def loop_over_a_cell():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(6, 8)

        def forward(self, x):
            state = x.new_zeros(x.shape[0], 8)
            states = []
            for step in x.unbind(1):
                state = self.cell(step, state)
                states.append(state)
            return torch.stack(states, 1)

    model = Loop()
    return model, lambda batch, steps: model(randn(batch, steps, 6))


@case(STEPS, MORE_STEPS)
def convolutions_and_lstm():
    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.front, self.layer = nn.Conv1d(6, 8, 3, padding=1), nn.LSTM(8, 8, bidirectional=True, batch_first=True)
            self.head = nn.Linear(16, 10)

        def forward(self, x):
            states, _ = self.layer(self.front(x.transpose(1, 2)).relu().transpose(1, 2))
            return self.head(states).log_softmax(-1)

    model = Speech()
    return model, lambda batch, steps: model(randn(batch, steps, 6))


@case(STEPS, MORE_STEPS)
def attention_over_states():
    class Attentive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.score, self.head = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 1), nn.Linear(8, 3)

        def forward(self, x, lengths):
            states, _ = self.layer(x)
            hidden = torch.arange(x.shape[1])[None] >= lengths[:, None]
            weights = self.score(states).squeeze(-1).masked_fill(hidden, float("-inf")).softmax(-1)
            return self.head((weights.unsqueeze(-1) * states).sum(1))

    model = Attentive()
    return model, lambda batch, steps: model(randn(batch, steps, 6), _lengths(batch, steps))


@case([((2, 4, 6),), ((3, 9, 6),)], [((1, 5, 6),), ((4, 12, 6),)])
def sequence_first():
    model = nn.RNN(6, 8, nonlinearity="relu", bidirectional=True)
    return model, lambda shape: model(randn(shape[1], shape[0], 6))


@case(STEPS, MORE_STEPS)
def temporal_convolutions():
    class Causal(nn.Module):
        def __init__(self, dilation):
            super().__init__()
            self.pad, self.conv = (
                2 * dilation,
                nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 6, 3, padding=2 * dilation, dilation=dilation)),
            )

        def forward(self, x):
            return x + self.conv(x)[:, :, : -self.pad].relu()

    model = nn.Sequential(*(Causal(dilation) for dilation in (1, 2, 4)))
    return model, lambda batch, steps: model(randn(batch, 6, steps))


@case([(2, 5), (3, 8)], [(1, 6), (4, 11)])
def decoder_with_teacher():
    class Translation(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.encoder, self.decoder = (
                nn.Embedding(50, 8),
                nn.GRU(8, 8, batch_first=True),
                nn.GRUCell(8, 8),
            )
            self.head = nn.Linear(8, 50)

        def forward(self, source, target):
            state = self.encoder(self.words(source))[1][0]
            logits = []
            for index in range(4):
                state = self.decoder(self.words(target[:, index]), state)
                logits.append(self.head(state))
            return torch.stack(logits, 1)

    model = Translation()
    return model, lambda batch, steps: model(ints(batch, steps), ints(batch, 4))


@case([(2, 8), (3, 12)], [(1, 10), (4, 16)])
def sequential_mamba():
    from mambapy.mamba import Mamba, MambaConfig

    model = Mamba(MambaConfig(d_model=16, n_layers=2, pscan=False))
    return model, lambda batch, steps: model(randn(batch, steps, 16))


@case([(2,), (3,)], [(1,), (5,)])
def steps_of_mamba():
    from mambapy.mamba import Mamba, MambaConfig

    class Stepwise(nn.Module):
        def __init__(self):
            super().__init__()
            self.mamba = Mamba(MambaConfig(d_model=16, n_layers=2))

        def forward(self, x, caches):
            return self.mamba.step(x, caches)

    model = Stepwise()

    def use(batch):
        caches = [(None, torch.zeros(batch, 32, 3)) for _ in range(2)]
        for _ in range(3):
            _, caches = model(randn(batch, 16), caches)

    return model, use
