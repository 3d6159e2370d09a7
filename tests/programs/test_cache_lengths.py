"""What caches count and allocate: tokens that left a window, layers of a fixed length, parts of encoder states."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import exportkit
from exportkit import InputObserver
from exportkit.errors import ArgumentError
from tests.arguments.generative import gemma3_text
from tests.models import random_ids, tiny_llama, tiny_mistral, tiny_t5

pytestmark = pytest.mark.runtime


def decode_step(cache, mask, tokens=1, seed=0):
    """One call on a cache, as ``generate`` makes it: with a mask over all tokens, and the positions of the new ones."""
    torch.manual_seed(seed)
    batch, length = mask.shape
    positions = torch.arange(length - tokens, length).expand(batch, -1)
    given = {"input_ids": random_ids(batch, tokens), "attention_mask": mask, "position_ids": positions}
    return {**given, "past_key_values": cache, "use_cache": True}


def exported(model, run, folder, **options):
    observer = InputObserver()
    with observer(model, **options), torch.no_grad():
        run()
    graph = exportkit.export(model, observer).to_onnx(folder / "model.onnx")
    assert graph.verify().ok
    return graph


@pytest.mark.parametrize("tokens", [(1, 1, 1), (1, 2, 3)], ids=["one token", "several tokens"])
def test_padding_is_read_at_the_right_place_if_all_recorded_windows_were_full(tokens, tmp_path):
    model = tiny_mistral(sliding_window=6)

    observer = InputObserver()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=random_ids(2, 9), past_key_values=cache)
    with observer(model), torch.no_grad():
        length = 9
        for seed, new in enumerate(tokens):
            length += new
            model(**decode_step(cache, torch.ones(2, length, dtype=torch.int64), new, seed))
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    assert graph.verify().ok

    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[0, :7], mask[1, 9:12] = 0, 0
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=random_ids(2, 14), attention_mask=mask[:, :14], past_key_values=cache)
        given = decode_step(cache, mask, tokens=2)
        found = graph(**copy.deepcopy(given))
        expected = model(**given)
    torch.testing.assert_close(found["logits"], expected.logits)
    assert found["past_key_values"].get_seq_length() == 16


def test_few_tokens_fit_into_a_window_that_was_full_in_the_trace(tmp_path):
    model = gemma3_text()[0].eval()  # a layer with a window, and one without

    def chunked(batch, lengths):
        cache, length, logits = DynamicCache(config=model.config), 0, []
        for seed, new in enumerate(lengths):
            length += new
            mask = torch.ones(batch, length, dtype=torch.int64)
            logits.append(model(**decode_step(cache, mask, new, seed)).logits)
        return torch.cat(logits, dim=1)

    graph = exported(model, lambda: (chunked(2, [3, 2]), chunked(3, [2, 2, 2, 1])), tmp_path)
    for batch, lengths in ((2, [2, 2]), (1, [2, 2, 2]), (4, [7, 3]), (3, [5, 1, 2, 4])):
        assert exportkit.compare_runs(lambda b=batch, n=lengths: chunked(b, n), model, graph).equal, lengths


def test_a_second_turn_on_full_windows_returns_the_same_logits(tmp_path):
    model = tiny_mistral(sliding_window=6)

    def turns(batch, length, padding):
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        mask = torch.ones(batch, length + 7, dtype=torch.int64)
        mask[0, :padding] = 0
        torch.manual_seed(length)
        first = model.generate(
            random_ids(batch, length), attention_mask=mask[:, :length], return_dict_in_generate=True, **options
        )
        tokens = torch.cat([first.sequences, random_ids(batch, 3)], dim=1)
        options |= {"return_dict_in_generate": True, "output_logits": True}
        second = model.generate(tokens, attention_mask=mask, past_key_values=first.past_key_values, **options)
        return torch.stack(second.logits)

    def run():
        turns(2, 7, padding=2)
        turns(3, 5, padding=0)

    graph = exported(model, run, tmp_path)
    compared = exportkit.compare_runs(lambda: turns(3, 9, padding=2), model, graph)
    assert compared.equal
    assert compared.outside == 0


def generation(model, batch, length, tokens, allocated):
    """Logits of a prompt and of single tokens, in a cache of a fixed length."""
    cache = StaticCache(config=model.config, max_cache_len=allocated)
    torch.manual_seed(length)
    found = [model(input_ids=random_ids(batch, length), past_key_values=cache).logits]
    found += [model(input_ids=random_ids(batch, 1), past_key_values=cache).logits for _ in range(tokens)]
    return [*found, cache.layers[-1].keys]


def test_a_cache_of_another_fixed_length_is_refused_or_used_as_it_is(tmp_path):
    model = tiny_llama()
    graph = exported(model, lambda: generation(model, 2, 3, 2, allocated=24), tmp_path)
    with graph.in_place_of(model), pytest.raises(ArgumentError, match="2, 24") as raised:
        generation(model, 2, 3, 2, allocated=32)
    assert "past_key_values.layers[0].keys" in str(raised.value)

    def run():
        generation(model, 2, 3, 2, allocated=24)
        generation(model, 3, 5, 2, allocated=32)

    graph = exported(model, run, tmp_path, store_n_calls=6)
    assert "cache_length" in str(graph.domain)
    with torch.no_grad():
        expected = generation(model, 2, 4, 3, allocated=40)
    with graph.in_place_of(model) as calls:
        torch.testing.assert_close(generation(model, 2, 4, 3, allocated=40), expected)
    assert calls.inside == 4


def test_static_windows_are_followed_whether_they_are_full_or_not(tmp_path):
    model = tiny_mistral(sliding_window=6)

    def run():
        generation(model, 2, 2, 2, allocated=24)
        generation(model, 3, 3, 1, allocated=24)

    observer = InputObserver()
    with observer(model, store_n_calls=5), torch.no_grad():
        run()
    exportkit.export(model, observer).save(tmp_path / "out")
    graph = exportkit.load(tmp_path / "out")
    assert graph.verify().ok
    for batch, length, tokens in [(1, 2, 2), (2, 2, 9), (2, 5, 3), (2, 6, 2), (3, 11, 2)]:
        with torch.no_grad():
            expected = generation(model, batch, length, tokens, allocated=24)
        with graph.in_place_of(model):
            torch.testing.assert_close(generation(model, batch, length, tokens, allocated=24), expected)


def test_the_counter_of_static_windows_is_a_constant_if_it_never_varied(tmp_path):
    model = tiny_mistral(sliding_window=6)
    cache = StaticCache(config=model.config, max_cache_len=24)
    observer = InputObserver()
    with torch.no_grad():
        model(input_ids=random_ids(2, 3), past_key_values=cache)
        later = copy.deepcopy(cache)
        with observer(model):
            model(input_ids=random_ids(2, 1), past_key_values=cache)
        model(input_ids=random_ids(2, 4), past_key_values=later)
    graph = exportkit.export(model, observer).to_onnx(tmp_path / "model.onnx")
    with pytest.raises(ArgumentError, match="cumulative_length_int"):
        graph(input_ids=random_ids(2, 1), past_key_values=later)


def test_a_part_of_the_encoder_states_in_a_cache_is_refused(tmp_path):
    model = tiny_t5()
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    graph = exported(model, lambda: model.generate(random_ids(2, 5), **options), tmp_path)
    cache = model.generate(random_ids(2, 3), **options).past_key_values
    states = model.encoder(random_ids(2, 6))
    given = {"decoder_input_ids": random_ids(2, 1), "encoder_outputs": states, "past_key_values": cache}
    mask = torch.ones(2, 6, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="past_encoder_sequence == 0 or past_encoder_sequence == "):
        graph(**given, attention_mask=mask, use_cache=True, return_dict=True)


class OneToken(torch.nn.Module):
    """Takes one token for each row, and a cache."""

    def __init__(self):
        super().__init__()
        self.decoder = tiny_mistral(sliding_window=6)

    def forward(self, token, cache, mask):
        result = self.decoder(input_ids=token[:, None], past_key_values=cache, attention_mask=mask)
        return result.logits, result.past_key_values


def single_steps(model, decoder, batch, prompt, steps):
    """Logits of single tokens after a prompt, each on the cache that the call before returned, and that cache."""
    torch.manual_seed(prompt)
    cache, found = DynamicCache(config=decoder.config), []
    with torch.no_grad():
        decoder(input_ids=random_ids(batch, prompt), past_key_values=cache)
        for step in range(steps):
            mask = torch.ones(batch, prompt + step + 1, dtype=torch.int64)
            mask[0, : prompt // 2] = 0
            logits, cache = model(random_ids(batch, 1)[:, 0], cache, mask)
            found.append(logits)
    return found, cache


@pytest.mark.parametrize("prompts", [(2, 3), (9, 8)], ids=["filling", "full"])
def test_returned_caches_count_on_from_the_given_ones(prompts, tmp_path):
    model, (first, second) = OneToken().eval(), prompts

    def run():
        single_steps(model, model.decoder, 2, first, 3)
        single_steps(model, model.decoder, 3, second, 3)

    graph = exported(model, run, tmp_path, store_n_calls=6)
    for batch, prompt, steps in [(2, 9, 3), (1, 3, 6), (3, 15, 2)]:
        expected, cache = single_steps(model, model.decoder, batch, prompt, steps)
        found, returned = single_steps(graph, model.decoder, batch, prompt, steps)
        torch.testing.assert_close(found, expected)
        assert returned.get_seq_length() == cache.get_seq_length() == prompt + steps
