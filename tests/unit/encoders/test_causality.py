"""Causal models are those whose states do not change with later tokens; `auto` pools them at their last token."""

import pytest
import torch
import transformers
from tokenizers import processors

from ranker.encoders.causality import auto_pooling, is_causal
from ranker.encoders.encoder import Encoder
from ranker.encoders.tiny import tiny_config, tiny_tokenizer

SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
GEMMA = {**SMALL, "head_dim": 16, "num_key_value_heads": 2, "intermediate_size": 64}
MODELS = {
    "bert": transformers.BertConfig(**SMALL, intermediate_size=64),
    "bert, decoder": transformers.BertConfig(**SMALL, intermediate_size=64, is_decoder=True),
    "roformer": transformers.RoFormerConfig(**SMALL, intermediate_size=64),  # no module has `is_causal`
    "roformer, decoder": transformers.RoFormerConfig(**SMALL, intermediate_size=64, is_decoder=True),
    "bloom": transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=2),  # likewise
    "xlnet": transformers.XLNetConfig(vocab_size=50, d_model=32, n_layer=2, n_head=2, d_inner=64),
    "gpt2": transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2),
    "qwen3": transformers.Qwen3Config(**GEMMA),
    "gemma3": transformers.Gemma3TextConfig(**GEMMA),
    "embeddinggemma": transformers.Gemma3TextConfig(**GEMMA, use_bidirectional_attention=True),
    "modernbert": transformers.ModernBertConfig(**SMALL, intermediate_size=64, pad_token_id=0),
    "t5": transformers.T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2),
    "bart": transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_causal_if_a_later_token_changes_no_state(name):
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(MODELS[name]).eval()
    model = model.get_encoder() if model.config.is_encoder_decoder else model
    tokens = torch.tensor([[7, 8, 9, 10], [7, 8, 9, 20]])
    with torch.no_grad():
        states = model(input_ids=tokens).last_hidden_state[:, 2]
    assert is_causal(model) == torch.equal(states[0], states[1])


def test_auto_is_last_for_causal_models_cls_where_the_tokenizer_puts_it_first_and_mean_else():
    def chosen(single=None, **config):
        tokenizer = tiny_tokenizer()
        if single is not None:
            specials = [("[CLS]", 2), ("[SEP]", 3)]
            processor = processors.TemplateProcessing
            tokenizer.backend_tokenizer.post_processor = processor(single=single, special_tokens=specials)
        settings = tiny_config()
        settings.is_decoder = config.get("is_decoder", False)
        return auto_pooling(Encoder(transformers.BertModel(settings, add_pooling_layer=False), tokenizer))

    assert chosen() == "cls"
    assert chosen(is_decoder=True) == "last"
    assert chosen("$A [SEP]") == "mean"
    assert chosen("$A [SEP] [CLS]") == "mean"  # XLNet's layout
