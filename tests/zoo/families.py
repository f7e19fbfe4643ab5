"""The encoder families of the zoo: how the hub's checkpoints of each are built, with two layers of 64 dimensions."""

from dataclasses import dataclass, field
from typing import Any

# all names that configurations have for sizes; a family gets the names that its class knows
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "d_inner", "hidden_dim", "ffn_dim", "feed_forward_size"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 128),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_size", "query_pre_attn_scalar"), 16),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size", "intra_bottleneck_size"), 32),
    **dict.fromkeys(("num_key_value_heads", "num_decoder_layers", "num_feedforward_networks"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 160),
}
IDS, TYPES = ("input_ids", "attention_mask"), ("input_ids", "token_type_ids", "attention_mask")


@dataclass(frozen=True)
class Recipe:
    """How to make a checkpoint.

    Args:
        config: Name of the configuration's class.
        weights: Name of the class with which the hub's checkpoints were saved.
        vocabulary: Key of `VOCABULARIES`.
        tokenizer: Name of the tokenizer's class in the hub's tokenizer_config.json.
        options: Configuration keys in addition to `SIZES` and the ids of special tokens.
        inputs: Names of the values that the tokenizer returns.
    """

    config: str
    weights: str
    vocabulary: str
    tokenizer: str
    options: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = IDS


def _of(stem: str, head: str, vocabulary: str, tokenizer: str, inputs: tuple[str, ...] = IDS, **options: Any) -> Recipe:
    """Return a recipe whose classes are named after `stem`."""
    return Recipe(f"{stem}Config", f"{stem}{head}", vocabulary, f"{tokenizer}Tokenizer", options, inputs)


MLM, LM, SEQ = "ForMaskedLM", "ForCausalLM", "ForConditionalGeneration"
GENERIC = "PreTrained"  # PreTrainedTokenizerFast's name without the suffix
SHIFTED = {"max_position_embeddings": 162}  # positions are counted from the padding id + 1
ROBERTA = {**SHIFTED, "type_vocab_size": 1}
RELATIVE = {"type_vocab_size": 0, "relative_attention": True, "position_biased_input": False}
DEBERTA_V2 = {**RELATIVE, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32, "share_att_key": True}
DEBERTA_V2 |= {"norm_rel_ebd": "layer_norm"}
# shorter than the longest rows, but longer than ColBERT's queries
WINDOW = {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"]}
LOCAL = {"bos_token_id": 1, "eos_token_id": 2, "local_attention": 64, "num_hidden_layers": 3}
LOCAL |= {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
GEMMA = {key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "num_key_value_heads", "head_dim", "query_pre_attn_scalar", "max_position_embeddings")}  # fmt: skip

FAMILIES: dict[str, Recipe] = {
    # encoders of BERT's time
    "bert": _of("Bert", MLM, "bert", "Bert", TYPES),
    "roberta": _of("Roberta", MLM, "roberta", "Roberta", **ROBERTA),
    "xlm-roberta": _of("XLMRoberta", MLM, "xlm-roberta", "XLMRoberta", **ROBERTA),
    "camembert": _of("Camembert", MLM, "camembert", "Camembert", **ROBERTA),
    "electra": _of("Electra", "ForPreTraining", "bert", "Electra", TYPES),
    "distilbert": _of("DistilBert", MLM, "bert", "DistilBert"),
    "albert": _of("Albert", MLM, "albert", "Albert", TYPES),
    "mobilebert": _of("MobileBert", "ForPreTraining", "bert", "MobileBert", TYPES),
    "mpnet": _of("MPNet", MLM, "mpnet", "MPNet", **SHIFTED),
    "deberta": _of("Deberta", MLM, "deberta", "Deberta", TYPES, **RELATIVE, pos_att_type=["c2p", "p2c"]),
    "deberta-v2": _of("DebertaV2", MLM, "deberta-v2", "DebertaV2", TYPES, **DEBERTA_V2, conv_kernel_size=3,
        conv_act="gelu"),
    "deberta-v3": _of("DebertaV2", "Model", "deberta-v2", "DebertaV2", TYPES, **DEBERTA_V2),
    "ernie": _of("Ernie", MLM, "bert", "Bert", TYPES, use_task_id=True, type_vocab_size=4),
    "squeezebert": _of("SqueezeBert", MLM, "bert", "SqueezeBert", TYPES, embedding_size=64),
    "roformer": _of("RoFormer", MLM, "bert", "Bert", TYPES),
    "convbert": _of("ConvBert", MLM, "bert", "ConvBert", TYPES),
    "megatron-bert": _of("MegatronBert", MLM, "bert", "Bert", TYPES),
    "rembert": _of("RemBert", MLM, "rembert", "RemBert", TYPES),
    "xmod": _of("Xmod", MLM, "xlm-roberta", "XLMRoberta", **ROBERTA, languages=["en_XX"], default_language="en_XX"),
    "data2vec-text": _of("Data2VecText", MLM, "roberta", "Roberta", **ROBERTA),
    "roberta-prelayernorm": _of("RobertaPreLayerNorm", MLM, "roberta", "Roberta", **ROBERTA),
    "ibert": _of("IBert", MLM, "roberta", "Roberta", **ROBERTA),
    # encoders with other kinds of attention
    "xlnet": _of("XLNet", "LMHeadModel", "xlnet", "XLNet", TYPES),
    "funnel": _of("Funnel", "ForPreTraining", "funnel", "Funnel", TYPES, block_sizes=[1, 1, 1], num_decoder_layers=1),
    "reformer": _of("Reformer", "ModelWithLMHead", "reformer", "Reformer", attn_layers=["local", "lsh"],
        axial_pos_shape=[16, 32], axial_pos_embds_dim=[16, 48], max_position_embeddings=512, local_attn_chunk_length=16,
        lsh_attn_chunk_length=16, num_buckets=8, is_decoder=True),
    "longformer": _of("Longformer", MLM, "roberta", "Longformer", **ROBERTA, attention_window=[16, 16]),
    "big_bird": _of("BigBird", MLM, "big_bird", "BigBird", TYPES, block_size=8, num_random_blocks=1),
    "nystromformer": _of("Nystromformer", MLM, "albert", "Albert", TYPES, num_landmarks=16, segment_means_seq_len=16,
        conv_kernel_size=5),
    "yoso": _of("Yoso", MLM, "albert", "Albert", TYPES, **SHIFTED, type_vocab_size=2, use_fast_hash=False),
    "fnet": _of("FNet", MLM, "albert", "FNet", ("input_ids", "token_type_ids")),
    "mra": _of("Mra", MLM, "roberta", "Roberta", **SHIFTED, block_per_row=2),
    "canine": Recipe("CanineConfig", "CanineModel", "", "CanineTokenizer"),
    # recent encoders
    "modernbert": _of("ModernBert", MLM, "modernbert", GENERIC, **LOCAL),
    "eurobert": _of("EuroBert", MLM, "llama3", GENERIC),
    "nomic_bert": _of("NomicBert", MLM, "bert", "Bert", TYPES),
    "gte": _of("Gte", "Model", "xlm-roberta", "XLMRoberta"),
    "jina_embeddings_v3": _of("JinaEmbeddingsV3", MLM, "xlm-roberta", "XLMRoberta", type_vocab_size=1),
    "embeddinggemma": _of("Gemma3Text", "Model", "gemma", "Gemma", **WINDOW, use_bidirectional_attention=True),
    # encoders of encoder-decoders
    "t5": _of("T5", SEQ, "t5", "T5", decoder_start_token_id=0),
    "t5-encoder": _of("T5", "EncoderModel", "t5", "T5"),
    "longt5": _of("LongT5", SEQ, "t5", "T5", local_radius=15, global_block_size=8,
        encoder_attention_type="transient-global", decoder_start_token_id=0),
    "umt5": _of("UMT5", SEQ, "t5", "T5", decoder_start_token_id=0),
    "mt5": _of("MT5", SEQ, "t5", "T5", decoder_start_token_id=0),
    "t5gemma": _of("T5Gemma", SEQ, "gemma", "Gemma", encoder=GEMMA | WINDOW, decoder=GEMMA | WINDOW),
    "bart": _of("Bart", SEQ, "roberta", "Bart"),
    "mbart": _of("MBart", SEQ, "mbart", "MBart"),
    # decoders
    "modernbert-decoder": _of("ModernBertDecoder", LM, "modernbert", GENERIC, **LOCAL),
    "gpt2": _of("GPT2", "LMHeadModel", "gpt2", "GPT2"),
    "gpt_neox": _of("GPTNeoX", LM, "gpt_neox", "GPTNeoX"),
    "opt": _of("OPT", LM, "opt", "GPT2"),
    "llama": _of("Llama", LM, "llama", "Llama"),
    "mistral": _of("Mistral", LM, "llama", "Llama", sliding_window=48),
    "qwen2": _of("Qwen2", LM, "qwen", "Qwen2"),
    "qwen3": _of("Qwen3", LM, "qwen", "Qwen2"),
    "gemma": _of("Gemma", LM, "gemma", "Gemma"),
    "gemma2": _of("Gemma2", LM, "gemma", "Gemma", **WINDOW),
    "gemma3": Recipe("Gemma3TextConfig", "Gemma3ForCausalLM", "gemma", "GemmaTokenizer", WINDOW),
    "phi": _of("Phi", LM, "gpt2", "CodeGen"),
    "phi3": _of("Phi3", LM, "phi3", "Llama"),
    "smollm3": _of("SmolLM3", LM, "llama3", GENERIC),
    "bloom": _of("Bloom", LM, "bloom", GENERIC),
    "granite": _of("Granite", LM, "gpt2", "GPT2"),
    "olmo2": _of("Olmo2", LM, "gpt2", "GPT2"),
    "lfm2": _of("Lfm2", LM, "llama3", GENERIC, layer_types=["conv", "full_attention"]),
    "mamba": _of("Mamba", LM, "gpt_neox", "GPTNeoX", state_size=8),
    "mamba2": _of("Mamba2", LM, "gpt_neox", "GPTNeoX", state_size=8, num_heads=8, n_groups=1, chunk_size=16),
    "qwen3_moe": _of("Qwen3Moe", LM, "qwen", "Qwen2", num_experts=4, num_experts_per_tok=2),
    "mixtral": _of("Mixtral", LM, "llama", "Llama", num_local_experts=4),
}  # fmt: skip
