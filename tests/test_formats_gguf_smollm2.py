"""A real GGUF file, SmolLM2-135M-Instruct as Q4_1: its config, tensors and tokenizer."""

import json

import gguf
import numpy as np
import pytest
from varied_texts import varied_texts

from jaxft.device import user_cache
from jaxft.formats.gguf import GgufFile


@pytest.fixture(scope="module")
def smollm2() -> GgufFile:
    path = user_cache() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        pytest.skip(f"needs SmolLM2 at {path}; scripts/quickstart.sh puts it there")
    return GgufFile(path)


def test_smollm2_config_and_tensors(smollm2):
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: smollm2.config[key] for key in expected} == expected
    sizes = [np.prod(smollm2.shape(name)) for name in smollm2.names()]
    assert sum(sizes) == 134_515_008
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2.path).tensors}
    for ours, theirs in (("mlp.down_proj", "ffn_down"), ("self_attn.k_proj", "attn_k")):
        tensor = stored[f"blk.7.{theirs}.weight"]
        raw = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        got = smollm2.read(f"model.layers.7.{ours}.weight")
        if ours == "mlp.down_proj":
            np.testing.assert_array_equal(got, raw)
        else:
            rows = np.arange(192).reshape(3, 2, 32).transpose(0, 2, 1).ravel()
            np.testing.assert_array_equal(got[rows], raw)
            assert np.abs(got - raw).max() > 0.1


def test_smollm2_splits_digits(smollm2):
    tokenizer = smollm2.tokenizer()
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.tokenize("$3,500.75") == ["$", *"3,500.75"]
    assert tokenizer.tokenize("on  Monday  2/5") == ["on", "Ġ", "ĠMonday", "ĠĠ", "2", "/", "5"]
    assert tokenizer.tokenize("a ½") == ["a", "Ġ", "Â½"]
    assert tokenizer("<|im_start|>user").input_ids[0] == 1
    assert tokenizer("hello").input_ids[0] != 1  # no BOS
    chat = [{"role": "user", "content": "7"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n")
    for text in ("2024 In 3,500 ½ \n\n x", "<|im_start|>Zürich<|im_end|>"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_smollm2_agrees_with_transformers_without_digits(smollm2, shared):
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2.path.parent, gguf_file=smollm2.path.name)
    ours = smollm2.tokenizer()
    rows = (shared / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [text for row in rows[:300] for text in json.loads(row).values()]
    texts += varied_texts(special=("<|im_start|>", "<|im_end|>"))
    plain = ["".join(c for c in text if not c.isnumeric()) for text in texts]
    assert len(set(plain)) > 2000
    assert [ours(text).input_ids for text in plain] == [theirs(text).input_ids for text in plain]
    # transformers drops the digit splitting, so with digits the two must differ somewhere
    assert [ours(text).input_ids for text in texts] != [theirs(text).input_ids for text in texts]
