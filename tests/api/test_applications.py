"""Several modules in one observation: a pipeline with a text encoder, a UNet and the decoder of a VAE."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import exportkit
from exportkit.errors import InvalidRequestError, InvalidTypeError, NoCallsError, UnknownMethodError
from tests.programs.test_several import TwoKernels


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(20, 6), nn.Linear(6, 6)

    def forward(self, ids):
        return {"context": self.mix(self.embed(ids)).tanh()}


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.context = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(6, 2)

    def forward(self, latents, timestep, context):
        return self.read(latents) / (1 + timestep) + self.context(context).mean(1)[:, :, None, None]


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, 2, 2, stride=2), nn.ConvTranspose2d(2, 3, 2, stride=2)

    def encode(self, image):
        return self.encoder(image)

    def decode(self, latents, generator=None):
        return self.decoder(latents).sigmoid()

    def forward(self, image):
        return self.decode(self.encode(image))


class Pipeline:
    """Knows nothing of exportkit, and is not a module."""

    def __init__(self):
        self.text_encoder, self.unet, self.vae = TextEncoder().eval(), UNet().eval(), VAE().eval()
        self.tokenizer = {"a": 1, "cat": 2, "dog": 3}
        self.safety_checker = None

    @torch.no_grad()
    def __call__(self, prompts, steps=2, size=4, generator=None):
        ids = torch.tensor([[self.tokenizer[word] for word in prompt.split()] for prompt in prompts])
        context = self.text_encoder(ids)["context"]
        latents = torch.randn(len(prompts), 2, size, size + 2, generator=generator)
        for step in range(steps):
            latents = latents - 0.1 * self.unet(latents, torch.tensor(float(step)), context=context)
        return self.vae.decode(latents, generator=generator)  # as pipelines of diffusers do


PARTS = {"text_encoder": "text_encoder", "unet": "unet", "vae_decode": "vae"}


def state(pipe):
    return [dict(vars(module)) for each in (pipe.text_encoder, pipe.unet, pipe.vae) for module in each.modules()]


@pytest.fixture(scope="module")
def pipe():
    torch.manual_seed(0)
    return Pipeline()


@pytest.fixture(scope="module")
def observer(pipe):
    observer = exportkit.InputObserver()
    before = state(pipe)
    with observer(pipe):
        pipe(["a cat"], generator=torch.Generator().manual_seed(0))
        pipe(["a cat", "a dog"], size=6, generator=torch.Generator().manual_seed(1))
    assert state(pipe) == before
    return observer


@pytest.fixture(scope="module")
def saved(pipe, observer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipe") / "out"
    return folder, exportkit.export(pipe, observer).save(folder)


class TestObserve:
    def test_the_modules_and_methods_that_run_are_found(self, observer):
        assert {name: part.module for name, part in observer.parts.items()} == PARTS
        assert observer.parts["vae_decode"].observation.method_name == "decode"
        assert [len(part.observation.calls) for part in observer.parts.values()] == [2, 3, 2]
        assert observer.num_obs() == 7

    def test_methods_can_be_named(self, pipe):
        observer = exportkit.InputObserver()
        with observer({"unet": pipe.unet, "decoder": (pipe.vae, "decode")}):
            pipe(["a cat"])
        assert list(observer.parts) == ["unet", "decoder"]

    def test_a_method_that_calls_the_forward_of_its_module_is_not_recorded_itself(self):
        class Sampler(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(3, 3)

            def sample(self, x, steps):
                for _ in range(steps):
                    x = self(x)
                return x

            def forward(self, x):
                return self.inner(x)

        app, observer = SimpleNamespace(stages=[Sampler()]), exportkit.InputObserver()
        with observer(app):
            app.stages[0].sample(torch.ones(2, 3), 2)
        (part,) = observer.parts.values()
        assert (part.module, part.observation.method_name, len(part.observation.calls)) == ("stages.0", "forward", 2)

    def test_modules_that_a_method_with_text_calls_are_recorded(self):
        class Speaker(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder, self.vocoder = nn.Embedding(9, 3), nn.Linear(3, 4)

            def speak(self, text):
                return self.vocoder(self.encoder(torch.tensor([[len(word) for word in text.split()]])))

        app, observer = SimpleNamespace(speaker=Speaker()), exportkit.InputObserver()
        with observer(app):
            app.speaker.speak("one three")
        assert list(observer.parts) == ["encoder", "vocoder"]

    def test_each_module_has_an_observation_of_its_own(self, observer):
        with pytest.raises(InvalidRequestError, match=r"observer\.parts\['text_encoder'\]\.observation"):
            observer.plan()
        alone = exportkit.export(TextEncoder(), observer.parts["text_encoder"].observation)
        assert set(alone.domain.ranges) == {"batch", "sequence"}

    @pytest.mark.parametrize(
        ("application", "options", "error", "text"),
        [
            (SimpleNamespace(name="x"), {}, InvalidTypeError, "an object that holds some, such as a pipeline"),
            ({}, {}, InvalidRequestError, "an empty dict"),
            ({"unet": 3}, {}, InvalidTypeError, r"\(vae, 'decode'\)"),
            ({"a/b": nn.Linear(1, 1)}, {}, InvalidRequestError, "'a/b'"),
            ({"vae": (VAE(), "decipher")}, {}, UnknownMethodError, "decipher"),
            ({"vae": VAE()}, {"parts": "auto"}, InvalidRequestError, "parts is only supported for a single model"),
            (
                {"vae": VAE()},
                {"method_name": "decode"},
                InvalidRequestError,
                "method_name is only supported for a single model",
            ),
        ],
    )
    def test_wrong_applications_are_refused_before_anything_is_observed(self, application, options, error, text):
        with pytest.raises(error, match=text), exportkit.InputObserver()(application, **options):
            pytest.fail("the block runs")

    def test_what_was_called_instead_is_said(self, pipe):
        observer = exportkit.InputObserver()
        with observer({"unet": pipe.unet, "vae": pipe.vae}):
            pipe(["a cat"])
        with pytest.raises(NoCallsError, match=r"`decode` was called, `forward` was not") as raised:
            exportkit.export({"unet": pipe.unet, "vae": pipe.vae}, observer)
        assert "(model, 'decode')" in str(raised.value)

    def test_nothing_called_is_said(self, pipe):
        observer = exportkit.InputObserver()
        with observer(pipe):
            pass
        with pytest.raises(NoCallsError, match=r"No module of Pipeline was called[^$]*text_encoder, unet, vae"):
            exportkit.export(pipe, observer)

    def test_an_error_of_the_run_passes_and_nothing_stays(self, pipe):
        before = state(pipe)
        with pytest.raises(KeyError, match="mouse"), exportkit.InputObserver()(pipe):
            pipe(["a mouse"])
        assert state(pipe) == before


def _calls_decode(model):
    model.decode(torch.ones(1, 2, 3, 3))


def _loops(wrapper):
    wrapper.sample(torch.ones(1, 3))


def _calls_the_inner_module(wrapper):
    wrapper.inner(torch.ones(1, 3))


class Sampler(torch.nn.Module):
    """Calls its inner module in a loop, as the generation of a model with adapters does."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 3))

    def forward(self, x):
        return self.inner(x)

    def sample(self, x):
        for _ in range(3):
            x = self.inner(x)
        return x


@pytest.mark.parametrize(
    ("make", "run", "said", "hint"),
    [
        (VAE, _calls_decode, "`decode` was called, `forward` was not", "pass method_name='decode'"),
        (
            Sampler,
            _loops,
            "`sample` was called, `forward` was not",
            "the module that it calls: `with observer(model.inner):`",
        ),
        (Sampler, _calls_the_inner_module, "`inner` was called, `forward` was not", "`with observer(model.inner):`"),
    ],
)
def test_what_ran_instead_of_the_observed_method_is_said(make, run, said, hint):
    model, observer = make(), exportkit.InputObserver()
    before = dict(vars(model))
    with observer(model):
        run(model)
    with pytest.raises(NoCallsError, match=said) as raised:
        exportkit.export(model, observer)
    assert hint in str(raised.value)
    assert vars(model) == before


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_an_observer_does_not_change_how_an_inner_module_is_compiled():
    model, observer = Sampler(), exportkit.InputObserver()
    compiled = torch.compile(model.inner, fullgraph=True, backend="eager")
    with observer(model):
        torch.testing.assert_close(compiled(torch.ones(1, 3)), model.inner(torch.ones(1, 3)))


@pytest.mark.runtime
class TestExport:
    def test_one_folder_holds_a_graph_for_each(self, saved):
        folder, onnx_model = saved
        assert sorted(file.name for file in folder.glob("*.onnx")) == [f"{name}.onnx" for name in sorted(PARTS)]
        assert (folder / "report.txt").read_text().splitlines()[-1] == "proven"
        assert onnx_model.verify().ok

    def test_the_loaded_folder_is_proven_again(self, saved):
        report = exportkit.load(saved[0]).verify()
        assert report.verdict() == "proven"
        assert list(report.parts) == list(PARTS)
        assert str(report).startswith("text_encoder\nproven for batch >= 1")

    def test_the_pipeline_runs_on_the_graphs(self, pipe, saved):
        before = state(pipe)

        def run():
            return pipe(["a dog", "a cat", "a cat"], steps=3, size=8, generator=torch.Generator().manual_seed(5))

        compared = exportkit.compare_runs(run, pipe, exportkit.load(saved[0]))
        assert compared.equal, str(compared)
        assert (compared.inside, compared.outside, compared.steps) == (5, 0, 5)
        assert state(pipe) == before

    def test_another_pipeline_on_the_meta_device_runs_on_the_graphs(self, pipe, saved):
        with torch.device("meta"):
            empty = Pipeline()
        torch.manual_seed(3)
        expected = pipe(["a dog"])
        torch.manual_seed(3)
        with saved[1].in_place_of(empty) as calls:
            torch.testing.assert_close(empty(["a dog"]), expected)
        assert calls.inside == 4

    def test_a_part_is_called_like_its_method(self, pipe, saved):
        latents = torch.randn(2, 2, 5, 5)
        torch.testing.assert_close(saved[1].parts["vae_decode"](latents), pipe.vae.decode(latents))

    def test_the_whole_has_no_call_of_its_own(self, saved):
        with pytest.raises(InvalidRequestError, match=r"\.parts\['text_encoder'\]"):
            saved[1](torch.ones(1, 2))
        assert repr(saved[1]).startswith("OnnxModel(text_encoder: OnnxModel(")

    def test_the_report_page_shows_each_module(self, saved, tmp_path):
        from exportkit.report.export import export_page

        page = export_page(saved[0])
        assert "<title>text_encoder, unet, vae_decode" in page
        assert all(f'id="{name}-verification"' in page for name in PARTS)

    def test_modules_of_a_dict(self, pipe, tmp_path):
        observer, modules = exportkit.InputObserver(), {"unet": pipe.unet, "decoder": (pipe.vae, "decode")}
        with observer(modules):
            pipe(["a cat"])
            pipe(["a cat"], size=6)
        onnx_model = exportkit.export(modules, observer).to_onnx(tmp_path / "model.onnx")
        assert sorted(file.name for file in tmp_path.glob("*.onnx")) == ["model.decoder.onnx", "model.unet.onnx"]
        for application in (modules, pipe):  # the pipeline has one module of the class of the decoder
            with onnx_model.in_place_of(application) as calls:
                pipe(["a dog"])
            assert repr(calls) == "InPlace(3 calls inside, 0 outside)"

    def test_a_module_that_needs_several_programs(self, tmp_path):
        torch.manual_seed(0)
        app, observer = SimpleNamespace(kernels=TwoKernels(), head=nn.Linear(8, 2)), exportkit.InputObserver()

        @torch.no_grad()
        def run(length):
            result, last = app.kernels(torch.randn(2, length, 8))
            for _ in range(2):
                result, last = app.kernels(torch.randn(2, 1, 8), last)
            return app.head(result)

        with observer(app):
            run(5)
        exportkit.export(app, observer).save(tmp_path / "out")
        names = sorted(file.name for file in (tmp_path / "out").glob("*.onnx"))
        assert names == ["head.onnx", "kernels.with_state.onnx", "kernels.without_state.onnx"]
        loaded = exportkit.load(tmp_path / "out")
        assert loaded.verify().ok
        assert exportkit.compare_runs(lambda: run(9), app, loaded).equal

    @pytest.mark.parametrize(
        ("application", "error"), [(nn.Linear(2, 2), UnknownMethodError), (print, InvalidTypeError)]
    )
    def test_the_place_of_something_else_is_refused(self, application, error, saved):
        with pytest.raises(error):
            saved[1].in_place_of(application)

    def test_options_of_a_single_model_are_refused(self, pipe, observer):
        with pytest.raises(InvalidRequestError, match="outputs is only supported for a single model"):
            exportkit.export(pipe, observer, outputs={"x": "unet"})

    def test_another_application_than_the_observed_one_is_refused(self, observer):
        with pytest.raises(UnknownMethodError, match=r"text_encoder\.forward"):
            exportkit.export(SimpleNamespace(unet=UNet()), observer)


@pytest.mark.runtime
class TestMethodsOfOneModel:
    def test_methods_that_run_without_forward(self, tmp_path):
        model, observer = VAE(), exportkit.InputObserver()
        with observer(model, parts=["encode", "decode"]):
            model.decode(model.encode(torch.randn(2, 3, 4, 4)))
            model.decode(model.encode(torch.randn(1, 3, 6, 8)))
        onnx_model = exportkit.export(model, observer).save(tmp_path / "out")
        assert list(onnx_model.parts) == ["encode", "decode"]
        image = torch.randn(3, 3, 8, 10)
        expected = model.decode(model.encode(image))
        with exportkit.load(tmp_path / "out").in_place_of(model) as calls:
            torch.testing.assert_close(model.decode(model.encode(image)), expected)
        assert calls.inside == 2

    def test_methods_that_forward_calls(self, tmp_path):
        model, observer = VAE(), exportkit.InputObserver()
        with observer(model, parts=["encode", "decode"]):
            model(torch.randn(2, 3, 4, 4))
        onnx_model = exportkit.export(model, observer).to_onnx(tmp_path / "vae.onnx")
        image = torch.randn(3, 3, 4, 4)
        torch.testing.assert_close(onnx_model(image), model(image))
        torch.testing.assert_close(onnx_model.parts["encode"](image), model.encode(image))
        assert onnx_model.verify().ok

    def test_a_part_that_was_not_called_is_named(self):
        model, observer = VAE(), exportkit.InputObserver()
        with pytest.warns(RuntimeWarning, match="The part 'decode' was not called"):  # noqa: SIM117
            with observer(model, parts=["encode", "decode"]):
                model.encode(torch.randn(1, 3, 4, 4))
        assert list(observer.parts) == ["encode"]
