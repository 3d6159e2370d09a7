"""Plans of six kinds of model, each from one generate of 4 tokens with batch 1."""

# ruff: noqa: E501 (tables are as wide as they print)

import pytest
import torch

import exportkit
from tests.arguments import generative

TABLES = {
    "llama": """
input                                       type     shape                              seen
input_ids                                   int64    (batch, sequence)                  1x7 1x1
attention_mask                              int64    (batch, past_sequence + sequence)  1x7 1x8 1x9 1x10
position_ids                                int64    (batch, sequence)                  1x7 1x1
past_key_values.layers[0].keys and 3 alike  float32  (batch, 2, past_sequence, 8)       absent 1x2x7x8 1x2x8x8 1x2x9x8

variable       evidence
sequence       same sizes in 2 inputs: 7, 1, 1, 1
past_sequence  length of the cache: 0, 7, 8, 9
batch          always 1; with rows repeated, the outputs repeated too
""",
    "gemma3_text": """
input                                       type     shape                                 seen
input_ids                                   int64    (batch, sequence)                     1x7 1x1
attention_mask                              int64    (batch, past_sequence + sequence)     1x7 1x8 1x9 1x10
position_ids                                int64    (batch, sequence)                     1x7 1x1
past_key_values.layers[0].keys and 1 alike  float32  (batch, 2, min(past_sequence, 5), 8)  absent 1x2x5x8
past_key_values.layers[1].keys and 1 alike  float32  (batch, 2, past_sequence, 8)          absent 1x2x7x8 1x2x8x8 1x2x9x8

variable       evidence
sequence       same sizes in 2 inputs: 7, 1, 1, 1
past_sequence  length of the cache: 0, 7, 8, 9
batch          always 1; with rows repeated, the outputs repeated too
""",
    "qwen2_5_vl": """
input                                       type     shape                              seen
input_ids                                   int64    (batch, sequence)                  1x12 1x1
attention_mask                              int64    (batch, past_sequence + sequence)  1x12 1x13 1x14 1x15
position_ids                                int64    (4, batch, sequence)               4x1x12 4x1x1
past_key_values.layers[0].keys and 3 alike  float32  (batch, 2, past_sequence, 8)       absent 1x2x12x8 1x2x13x8 1x2x14x8
mm_token_type_ids                           int32    (batch, sequence)                  1x12 1x1
mm_encoder_outputs.image.pooler_output[0]   float32  (image_rows, 32)                   4x32 absent

variable       evidence
sequence       same sizes in 3 inputs: 12, 1, 1, 1
past_sequence  length of the cache: 0, 12, 13, 14
image_rows     as many as token 98 occurs in input_ids; the model raises for other numbers
batch          always 1; with rows repeated, the outputs repeated too
""",
    "falcon_h1": """
input                                                      type     shape                              seen
input_ids                                                  int64    (batch, sequence)                  1x7 1x1
attention_mask                                             int64    (batch, past_sequence + sequence)  1x7 1x8 1x9 1x10
position_ids                                               int64    (batch, sequence)                  1x7 1x1
past_key_values.layers[0].keys and 3 alike                 float32  (batch, 2, past_sequence, 8)       absent 1x2x7x8 1x2x8x8 1x2x9x8
past_key_values.layers[0].conv_states[0] and 1 alike       float32  (batch, 48, 4)                     absent 1x48x4
past_key_values.layers[0].recurrent_states[0] and 1 alike  float32  (batch, 4, 8, 8)                   absent 1x4x8x8

variable       evidence
sequence       same sizes in 2 inputs: 7, 1, 1, 1
past_sequence  length of the cache: 0, 7, 8, 9
batch          always 1; with rows repeated, the outputs repeated too
""",
    "t5": """
input                                                             type     shape                                 seen
attention_mask                                                    int64    (batch, sequence)                     1x7
decoder_input_ids                                                 int64    (batch, decoder_sequence)             1x1
encoder_outputs.last_hidden_state                                 float32  (batch, sequence, 32)                 1x7x32
past_key_values.self_attention_cache.layers[0].keys and 3 alike   float32  (batch, 4, past_sequence, 8)          absent 1x4x1x8 1x4x2x8 1x4x3x8
past_key_values.cross_attention_cache.layers[0].keys and 3 alike  float32  (batch, 4, past_encoder_sequence, 8)  absent 1x4x7x8

variable               evidence
past_sequence          length of the cache: 0, 1, 2, 3
past_encoder_sequence  length of the cache: 0, 7, 7, 7
batch                  always 1; with rows repeated, the outputs repeated too
sequence               always 7; the model accepts other lengths
decoder_sequence       always 1; the model accepts other lengths
""",
    "whisper": """
input                                                             type     shape                                 seen
decoder_input_ids                                                 int64    (batch, sequence)                     1x7 1x1
encoder_outputs.last_hidden_state                                 float32  (batch, encoder_sequence, 32)         1x10x32
past_key_values.self_attention_cache.layers[0].keys and 3 alike   float32  (batch, 4, past_sequence, 8)          absent 1x4x7x8 1x4x8x8 1x4x9x8
past_key_values.cross_attention_cache.layers[0].keys and 3 alike  float32  (batch, 4, past_encoder_sequence, 8)  absent 1x4x10x8

variable               evidence
sequence               sizes 7, 1, 1, 1
past_sequence          length of the cache: 0, 7, 8, 9
past_encoder_sequence  length of the cache: 0, 10, 10, 10
batch                  always 1; with rows repeated, the outputs repeated too
encoder_sequence       always 10; the model accepts other lengths
""",
    "speech_to_text": """
input                                                             type     shape                                 seen
attention_mask                                                    int64    (batch, 4*encoder_sequence - 2)       1x26
decoder_input_ids                                                 int64    (batch, sequence)                     1x1
encoder_outputs.last_hidden_state                                 float32  (batch, encoder_sequence, 32)         1x7x32
past_key_values.self_attention_cache.layers[0].keys and 1 alike   float32  (batch, 4, past_sequence, 8)          absent 1x4x1x8 1x4x2x8 1x4x3x8
past_key_values.cross_attention_cache.layers[0].keys and 1 alike  float32  (batch, 4, past_encoder_sequence, 8)  absent 1x4x7x8

variable               evidence
past_sequence          length of the cache: 0, 1, 2, 3
past_encoder_sequence  length of the cache: 0, 7, 7, 7
batch                  always 1; with rows repeated, the outputs repeated too
encoder_sequence       always 7; the model accepts other lengths, and 4 more of attention_mask for each
sequence               always 1; the model accepts other lengths
""",
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_one_generate_with_batch_one_gives_the_whole_plan(name):
    model, inputs = getattr(generative, name)()
    model.eval().generation_config.eos_token_id = None
    observer = exportkit.InputObserver()
    with observer(model, store_n_calls=4), torch.no_grad():
        model.generate(**inputs, max_new_tokens=4, do_sample=False)
    table = str(observer.plan()).partition("\n\nnote:")[0]
    assert table == TABLES[name].strip()
