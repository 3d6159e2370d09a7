"""Speech and sound: torchaudio, speechbrain, vocos, and code of codecs and vocoders."""

import torch
from cases import case, ints, randn
from torch import nn

FRAMES, MORE_FRAMES = [(2, 20), (3, 32)], [(1, 24), (4, 48)]
SOUND, MORE_SOUND = [(2, 1600), (3, 2400)], [(1, 2000), (2, 4000)]


def _with_lengths(model, width):
    def use(batch, frames):
        lengths = torch.tensor([frames, *[frames - 4] * (batch - 1)])
        model(randn(batch, frames, width), lengths)

    return model, use


@case(FRAMES, MORE_FRAMES)
def conformer_of_torchaudio():
    from torchaudio.models import Conformer

    return _with_lengths(Conformer(8, 2, 16, 2, 3), 8)


@case([(2, 20), (3, 32)], [(1, 24), (4, 48)])
def emformer():
    from torchaudio.models import Emformer

    model = Emformer(8, 2, 16, 2, segment_length=4, right_context_length=1)

    def use(batch, frames):
        model(randn(batch, frames + 1, 8), torch.tensor([frames + 1, *[frames - 3] * (batch - 1)]))

    return model, use


@case(SOUND, MORE_SOUND)
def wav2vec2_of_torchaudio():
    from torchaudio.models import wav2vec2_model

    model = wav2vec2_model(
        extractor_mode="group_norm",
        extractor_conv_layer_config=[(8, 10, 5), (8, 3, 2)],
        extractor_conv_bias=False,
        encoder_embed_dim=16,
        encoder_projection_dropout=0.0,
        encoder_pos_conv_kernel=8,
        encoder_pos_conv_groups=2,
        encoder_num_layers=1,
        encoder_num_heads=2,
        encoder_attention_dropout=0.0,
        encoder_ff_interm_features=32,
        encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.0,
        encoder_layer_norm_first=False,
        encoder_layer_drop=0.0,
        aux_num_out=10,
    )
    return model, lambda batch, samples: model(randn(batch, samples))


@case(SOUND, MORE_SOUND)
def separation_of_sources():
    from torchaudio.models import ConvTasNet

    model = ConvTasNet(
        2, 16, 16, msk_kernel_size=3, msk_num_feats=8, msk_num_hidden_feats=8, msk_num_layers=2, msk_num_stacks=1
    )
    return model, lambda batch, samples: model(randn(batch, 1, samples))


@case(FRAMES, MORE_FRAMES)
def deep_speech():
    from torchaudio.models import DeepSpeech

    model = DeepSpeech(8, n_hidden=16, n_class=10)
    return model, lambda batch, frames: model(randn(batch, 1, frames, 8))


@case([(2, 700), (3, 900)], [(1, 800), (4, 1200)])
def wav2letter():
    from torchaudio.models import Wav2Letter

    model = Wav2Letter(num_classes=10, input_type="mfcc", num_features=8)
    return model, lambda batch, frames: model(randn(batch, 8, frames))


@case([(2, 6), (3, 9)], [(1, 7), (4, 12)])
def wave_rnn():
    from torchaudio.models import WaveRNN

    model = WaveRNN([2, 4], 8, 8, n_res_block=1, n_rnn=16, n_fc=16, kernel_size=3, n_freq=8, n_hidden=8, n_output=8)
    return model, lambda batch, frames: model(randn(batch, 1, (frames - 2) * 8), randn(batch, 1, 8, frames))


@case([(2, 10, 12), (3, 14, 16)], [(1, 12, 14), (4, 20, 24)])
def tacotron():
    from torchaudio.models import Tacotron2

    model = Tacotron2(
        n_mels=8,
        symbol_embedding_dim=8,
        encoder_embedding_dim=8,
        encoder_n_convolution=1,
        decoder_rnn_dim=8,
        attention_rnn_dim=8,
        attention_hidden_dim=8,
        attention_location_n_filter=4,
        attention_location_kernel_size=3,
        prenet_dim=8,
        postnet_n_convolution=2,
        postnet_embedding_dim=8,
        decoder_dropout=0.0,
        attention_dropout=0.0,
    )
    model.decoder.prenet = nn.Linear(8, 8)  # the original drops random values also in eval mode

    def use(batch, words, frames):
        lengths = torch.tensor([words, *[words - 2] * (batch - 1)])
        model(ints(batch, words), lengths, randn(batch, 8, frames), torch.tensor([frames, *[frames - 3] * (batch - 1)]))

    return model, use


@case(SOUND, MORE_SOUND)
def mel_spectrogram():
    import torchaudio

    model = torchaudio.transforms.MelSpectrogram(16000, n_fft=400, hop_length=160, n_mels=16)
    return model, lambda batch, samples: model(randn(batch, samples))


@case(SOUND, MORE_SOUND)
def mfcc():
    import torchaudio

    options = {"n_fft": 400, "hop_length": 160, "n_mels": 16}
    model = torchaudio.transforms.MFCC(16000, n_mfcc=8, melkwargs=options)
    return model, lambda batch, samples: model(randn(batch, samples))


@case(SOUND, MORE_SOUND)
def resampling():
    import torchaudio

    model = torchaudio.transforms.Resample(16000, 12000)
    return model, lambda batch, samples: model(randn(batch, samples))


@case(SOUND, MORE_SOUND)
def filter_bank_of_kaldi():
    import torchaudio

    class Bank(nn.Module):
        def forward(self, sound):
            return torchaudio.compliance.kaldi.fbank(sound, num_mel_bins=23, dither=0.0)

    model = Bank()
    return model, lambda batch, samples: model(randn(1, samples + batch * 160))


@case(SOUND, MORE_SOUND)
def there_and_back_through_stft():
    class Through(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("window", torch.hann_window(64))

        def forward(self, sound):
            spectrum = torch.stft(sound, 64, 16, window=self.window, return_complex=True)
            mask = (spectrum.abs() - 0.1).clamp(min=0) / (spectrum.abs() + 1e-6)
            return torch.istft(spectrum * mask, 64, 16, window=self.window)

    model = Through()
    return model, lambda batch, samples: model(randn(batch, samples))


@case(FRAMES, MORE_FRAMES)
def vocos():
    import vocos

    backbone = vocos.models.VocosBackbone(8, 16, 32, 1)
    head = vocos.heads.ISTFTHead(16, 64, 16)
    model = nn.Sequential(backbone, head)
    return model, lambda batch, frames: model(randn(batch, 8, frames))


@case(SOUND, MORE_SOUND)
def codec_with_residuals():
    class Codec(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Conv1d(1, 8, 7, 4, 3), nn.ELU(), nn.Conv1d(8, 8, 7, 4, 3))
            self.decoder = nn.Sequential(nn.ConvTranspose1d(8, 8, 8, 4, 2), nn.ELU(), nn.ConvTranspose1d(8, 1, 8, 4, 2))
            self.books = nn.ParameterList(randn(16, 8) for _ in range(2))

        def forward(self, sound):
            rest = self.encoder(sound.unsqueeze(1)).transpose(1, 2)
            total, codes = torch.zeros_like(rest), []
            for book in self.books:
                codes.append(torch.cdist(rest, book.expand(rest.shape[0], -1, -1)).argmin(-1))
                total, rest = total + book[codes[-1]], rest - book[codes[-1]]
            return self.decoder(total.transpose(1, 2)).squeeze(1), torch.stack(codes, 1)

    model = Codec()
    return model, lambda batch, samples: model(randn(batch, samples))


@case(SOUND, MORE_SOUND, method="encode")
def encodec_encode():
    return _encodec(lambda model, sound: model.encode(sound))


@case(SOUND, MORE_SOUND)
def encodec_forward():
    return _encodec(lambda model, sound: model(sound))


def _encodec(run):
    import encodec
    from encodec.modules import SEANetDecoder, SEANetEncoder
    from encodec.quantization import ResidualVectorQuantizer

    options = {"dimension": 8, "n_filters": 4, "ratios": [4, 2], "lstm": 1, "norm": "weight_norm"}
    model = encodec.EncodecModel(
        SEANetEncoder(**options), SEANetDecoder(**options), ResidualVectorQuantizer(8, 2, 16), [6.0], 16000, 1
    )
    for layer in model.quantizer.vq.layers:
        layer._codebook.inited.fill_(1)
        layer._codebook.embed.normal_()
    return model, lambda batch, samples: run(model, randn(batch, 1, samples))


@case(FRAMES, MORE_FRAMES)
def vocoder():
    class Vocoder(nn.Module):
        def __init__(self):
            super().__init__()
            norm = nn.utils.weight_norm
            self.first, self.up = norm(nn.Conv1d(8, 16, 7, padding=3)), norm(nn.ConvTranspose1d(16, 8, 8, 4, 2))
            self.blocks = nn.ModuleList(norm(nn.Conv1d(8, 8, size, padding=size // 2)) for size in (3, 5))
            self.last = norm(nn.Conv1d(8, 1, 7, padding=3))

        def forward(self, mel):
            x = self.up(nn.functional.leaky_relu(self.first(mel), 0.1))
            x = sum(block(nn.functional.leaky_relu(x, 0.1)) for block in self.blocks) / len(self.blocks)
            return self.last(x).tanh().squeeze(1)

    model = Vocoder()
    return model, lambda batch, frames: model(randn(batch, 8, frames))


@case(FRAMES, MORE_FRAMES)
def durations_to_frames():
    class Regulator(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, ends):
            frames = torch.arange(32).view(1, -1, 1)
            owner = (frames >= ends.unsqueeze(1)).sum(-1).clamp(max=x.shape[1] - 1)
            return self.layer(x).gather(1, owner.unsqueeze(-1).expand(-1, -1, 8))

    model = Regulator()
    return model, lambda batch, words: model(randn(batch, words, 8), ints(batch, words, below=4).cumsum(1))


@case(FRAMES, MORE_FRAMES)
def crdnn_of_speechbrain():
    from speechbrain.lobes.models.CRDNN import CRDNN

    convolutions = {"cnn_blocks": 1, "cnn_channels": [4], "cnn_kernelsize": (3, 3), "time_pooling": True}
    others = {"rnn_layers": 1, "rnn_neurons": 8, "dnn_blocks": 1, "dnn_neurons": 8}
    model = CRDNN(input_size=8, **convolutions, **others)
    return model, lambda batch, frames: model(randn(batch, frames, 8))


@case(FRAMES, MORE_FRAMES)
def speaker_embedding():
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    layers = {"channels": [16] * 5, "kernel_sizes": [5, 3, 3, 3, 1], "attention_channels": 8, "se_channels": 8}
    model = ECAPA_TDNN(8, lin_neurons=8, res2net_scale=2, **layers)
    return model, lambda batch, frames: model(randn(batch, frames, 8), torch.tensor([1.0, *[0.75] * (batch - 1)]))


@case(FRAMES, MORE_FRAMES)
def x_vector():
    from speechbrain.lobes.models.Xvector import Xvector

    model = Xvector(in_channels=8, lin_neurons=8, tdnn_channels=[8] * 5)
    return model, lambda batch, frames: model(randn(batch, frames, 8))


@case(FRAMES, MORE_FRAMES)
def conformer_of_speechbrain():
    from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder

    model = ConformerEncoder(1, 8, 16, 2, kernel_size=3, attention_type="regularMHA")
    return model, lambda batch, frames: model(randn(batch, frames, 8))


@case([(2, 20), (3, 32)], [(1, 24), (4, 48)])
def dual_path_separation():
    from speechbrain.lobes.models.dual_path import Dual_Path_Model, SBTransformerBlock

    blocks = [SBTransformerBlock(1, 8, 2, d_ffn=16, norm_before=True) for _ in range(2)]
    model = Dual_Path_Model(8, 8, *blocks, num_layers=1, norm="ln", K=8, num_spks=2)
    return model, lambda batch, frames: model(randn(batch, 8, frames))


@case([(2, 20, 5), (3, 32, 8)], [(1, 24, 6), (4, 48, 9)])
def transformer_of_speechbrain():
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR

    model = TransformerASR(
        tgt_vocab=20, input_size=8, d_model=8, nhead=2, num_encoder_layers=1, num_decoder_layers=1, d_ffn=16
    )
    return model, lambda batch, frames, words: model(randn(batch, frames, 8), ints(batch, words, below=20))


@case([(2, 3), (1, 4)], [(1, 6), (3, 5)])
def whisper_of_openai():
    from whisper.model import ModelDimensions, Whisper

    model = Whisper(ModelDimensions(80, 100, 32, 2, 2, 60, 32, 32, 2, 2))
    return model, lambda batch, words: model(randn(batch, 80, 200), ints(batch, words, below=60))


@case([(2, 4096), (3, 8192)], [(1, 6144), (2, 12288)])
def demucs():
    from demucs.demucs import Demucs

    model = Demucs(["a", "b"], audio_channels=2, channels=4, depth=3, samplerate=4096, segment=1, resample=False)
    return model, lambda batch, samples: model(randn(batch, 2, samples))


@case([(2, 4096), (3, 8192), (1, 6000)], [(1, 6144), (2, 12288)])
def spectrogram_of_demucs():
    from demucs.htdemucs import HTDemucs

    class Spectrogram(nn.Module):
        hop_length, nfft = 128, 512
        _spec, _ispec = HTDemucs._spec, HTDemucs._ispec

        def forward(self, x):
            return self._ispec(self._spec(x), x.shape[-1])

    model = Spectrogram()
    return model, lambda batch, samples: model(randn(batch, 2, samples))


@case([(2, 4096), (3, 8192)], [(1, 6144), (2, 12288)])
def snac():
    from snac import SNAC

    model = SNAC(
        sampling_rate=4000, encoder_dim=8, encoder_rates=[2, 4], decoder_dim=32, decoder_rates=[4, 2], noise=False,
        attn_window_size=None, codebook_size=16, codebook_dim=4, vq_strides=[4, 2, 1],
    )  # fmt: skip
    return model, lambda batch, samples: model(randn(batch, 1, samples))
