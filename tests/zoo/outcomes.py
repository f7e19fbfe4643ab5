"""What must happen to each family of the zoo: the path that its encoder uses, or the message that refuses it."""

from dataclasses import dataclass

from tests.zoo.families import FAMILIES


@dataclass(frozen=True)
class Outcome:
    """The expected outcome of a family.

    Args:
        path: `Encoder.path`: `bert` and `modernbert` (layers of this package, without padding), `packed`
            (transformers' layers on one packed row), `padded`, or `by_length` (rows of one length together).
        refused: Beginning of the error message (without the folder's name) if training is refused before any work;
            empty: the family trains.
        own_export: Whether scores are exported as the family's own sequence classification model; else as
            sentence-transformers' modules.
        dropout: `hashed`: masks do not depend on the layout of the batch; `random`: they do, because the family calls
            dropout as a function and not as a module; `refused`: the family has no dropout on states.
        multi_vector: Whether sentence-transformers' MultiVectorEncoder can run the family.
        single: Allowed difference in float32 of a row in a batch from the row alone, relative to the largest state.
    """

    path: str = ""
    refused: str = ""
    own_export: bool = True
    dropout: str = "hashed"
    multi_vector: bool = True
    single: float = 1e-5


PATHS = {
    "bert": "bert roberta xlm-roberta camembert electra",
    "modernbert": "modernbert",
    "distilbert": "distilbert",
    "packed": """albert ernie xmod data2vec-text roberta-prelayernorm eurobert nomic_bert gte
        jina_embeddings_v3 embeddinggemma t5 t5-encoder umt5 mt5 t5gemma modernbert-decoder gpt2 gpt_neox opt llama
        mistral qwen2 qwen3 gemma gemma2 gemma3 phi phi3 smollm3 granite olmo2 qwen3_moe mixtral""",
    "padded": """mobilebert mpnet deberta deberta-v2 deberta-v3 squeezebert roformer megatron-bert rembert ibert xlnet
        longformer longt5 bart mbart bloom lfm2 mamba mamba2 big_bird""",
    "by_length": "convbert nystromformer yoso fnet",
}
REFUSED = {
    "funnel": "funnel models are not supported: ",
    "reformer": "reformer models are not supported: ",
    "mra": "mra models are not supported: ",
    "canine": "expected a fast tokenizer",
}
# families whose classifier transformers lacks, or whose classifier has a decoder that the text encoder lacks
NO_CLASSIFIER = "t5 t5-encoder longt5 umt5 mt5 t5gemma granite lfm2 mamba mamba2"
DROPOUT = {
    "refused": """eurobert embeddinggemma llama mistral qwen2 qwen3 gemma gemma2 gemma3 smollm3 granite olmo2 lfm2 mamba
        mamba2 qwen3_moe mixtral""",
    "random": "bart mbart opt bloom xlnet",  # XLNet: for as many relative positions as the longest row needs
}
SINGLE = {"mamba": 1e-4}  # its recurrence multiplies rounding errors
EXPERTS = ("qwen3_moe", "mixtral")  # the default kernel of their experts does not take float64


def _key_of(family: str, lists: dict[str, str], default: str) -> str:
    """Return the key of the list that names a family."""
    return next((key for key, families in lists.items() if family in families.split()), default)


OUTCOMES = {
    family: Outcome(
        path=_key_of(family, PATHS, ""),
        refused=REFUSED.get(family, ""),
        own_export=family not in NO_CLASSIFIER.split(),
        dropout=_key_of(family, DROPOUT, "hashed"),
        # MultiVectorEncoder needs an attention mask, and can't extend I-BERT's table by markers
        multi_vector=family not in ("fnet", "ibert"),
        single=SINGLE.get(family, 1e-5),
    )
    for family in FAMILIES
}
ONE_BY_ONE = PATHS["by_length"].split()  # families whose states depend on padding, in every program that pads
TRAINED = [family for family in FAMILIES if family not in REFUSED]
