"""Every family against transformers and PEFT, float32, on tiny sharpened models: one row each."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import load, logits
from model_oracles import (
    PROJECTIONS,
    add_lora,
    edit_config,
    in_peft,
    largest,
    loss_and_gradients,
    open_in_transformers,
    pack_rows,
    peft_loss_and_gradients,
    relative,
    their_logits,
)

from jaxft.formats.peft import AdapterConfig, save_adapter
from jaxft.lora import adapter_arrays
from jaxft.model.families import FAMILIES

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 50))
SEEN = 1e-2  # what a slip must move the logits by
RANDOM = np.random.default_rng(1)
DOCUMENTS = [RANDOM.integers(0, 64, n).tolist() for n in (17, 9, 12, 1, 2)]
RUN_ON = [token for document in DOCUMENTS for token in document]


@dataclass(frozen=True)
class Family:
    """A tiny model of a family.

    Attributes:
      name: of transformers' classes, `<name>ForCausalLM`.
      config_class: of transformers, where it is not `<name>Config`.
      config: settings that make the family's peculiarities bite.
      slips: changes of config.json, each of which must give other logits.
      embedding_gain: factor on the embeddings, for caps that bite.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    slips: dict[str, dict[str, Any]] = field(default_factory=dict)
    config_class: str = ""
    embedding_gain: float = 1.0


def theta(value: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value}}


LOCAL, GLOBAL = ({"rope_type": "default", "rope_theta": base} for base in (1e4, 1e6))
OTHER = {**LOCAL, "rope_theta": 1e2}
GEMMA3_ROPES = {
    "sliding_attention": LOCAL,
    "full_attention": {**GLOBAL, "rope_type": "linear", "factor": 8.0},
}
FAMILY_TABLE = {
    "llama": Family(
        "Llama",
        {"attention_bias": True, "mlp_bias": True, **theta(5e5)},
        {"theta": theta(1e4)},
    ),
    "mistral": Family(
        "Mistral",
        {"sliding_window": 8, "head_dim": 16, **theta(1e6)},
        {"window": {"sliding_window": 16}, "theta": theta(1e4)},
    ),
    "qwen2": Family(
        "Qwen2",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
            **theta(1e6),
        },
        {
            "window": {"sliding_window": 16},
            "where windows begin": {"max_window_layers": 3, "layer_types": None},
            "theta": theta(1e4),
        },
    ),
    "qwen3": Family(
        "Qwen3",
        {"head_dim": 16, "attention_bias": True, **theta(1e6)},
        {"theta": theta(1e4), "norm": {"rms_norm_eps": 0.1}},
    ),
    "gemma": Family(
        "Gemma",
        {"head_dim": 16, **theta(1e4)},
        {"theta": theta(1e2)},
    ),
    "gemma2": Family(
        "Gemma2",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 8.0,
            "sliding_window": 8,
            **theta(1e4),
        },
        {
            "attention cap": {"attn_logit_softcapping": 50.0},
            "final cap": {"final_logit_softcapping": 15.0},
            "scale": {"query_pre_attn_scalar": 16},
            "window": {"sliding_window": 16},
            "theta": theta(1e2),
        },
        embedding_gain=10.0,
    ),
    "gemma3_text": Family(
        "Gemma3",
        {
            "num_hidden_layers": 14,  # two periods of six and two more
            "head_dim": 16,
            "query_pre_attn_scalar": 64,
            "sliding_window": 4,
            "rope_parameters": GEMMA3_ROPES,
        },
        {
            "local theta": {
                "rope_parameters": {
                    **GEMMA3_ROPES,
                    "sliding_attention": {**LOCAL, "rope_theta": 1e2},
                }
            },
            "linear scaling": {"rope_parameters": {**GEMMA3_ROPES, "full_attention": GLOBAL}},
            "scale": {"query_pre_attn_scalar": 16},
            "window": {"sliding_window": 8},
        },
        config_class="Gemma3TextConfig",
    ),
}


def save(folder: Path, row: Family, gain: float = 6.0, **sizes: Any) -> Any:
    """The row's model, with other sizes if wanted, saved to a folder; returns it."""
    import transformers
    from tiny_torch import tiny_model

    config_class = getattr(transformers, row.config_class or f"{row.name}Config")
    model_class = getattr(transformers, f"{row.name}ForCausalLM")
    model = tiny_model(model_class, config_class, gain=gain, **(row.config | sizes))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(row.embedding_gain)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=FAMILY_TABLE)
def family(request, tmp_path_factory):
    """Row, folder, transformers' model and our decoder of a family."""
    row = FAMILY_TABLE[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = save(folder, row)
    return row, folder, model, load(folder)


def test_every_family_has_a_row():
    # test_model_gemma3_vision.py has a Gemma 3 with other parts
    assert FAMILY_TABLE.keys() | {"gemma3"} == FAMILIES.keys()


def test_logits(family, tmp_path):
    row, folder, model, decoder = family
    got, want = logits(decoder, TOKENS), their_logits(model, TOKENS)
    assert largest(got, want) < 1e-4
    for slip in row.slips.values():
        wrong = shutil.copytree(folder, tmp_path / "slip", dirs_exist_ok=True)
        assert largest(logits(load(edit_config(wrong, slip)), TOKENS), want) > SEEN, slip


def test_loss_and_gradients_packed(family):
    """Five documents in one row against PEFT that sees each alone; the padding is not zero."""
    _, folder, _, _ = family
    decoder = add_lora(load(folder))
    loss, gradients = loss_and_gradients(decoder)(pack_rows([DOCUMENTS], 48))
    peft_model = in_peft(open_in_transformers(folder), decoder)
    their_loss, want = peft_loss_and_gradients(peft_model, DOCUMENTS)
    assert loss == pytest.approx(their_loss, rel=1e-5)
    assert relative(gradients, want) < 1e-4
    run_on, other = peft_loss_and_gradients(peft_model, [RUN_ON])  # the control
    assert abs(loss - run_on) > 1e-1
    assert relative(gradients, other) > 1e-2


def test_packed_is_unpacked(family):
    """A document's hidden states do not depend on its neighbours, windows and all."""
    _, _, _, decoder = family
    row, segments = RUN_ON, []
    for number, document in enumerate(DOCUMENTS, start=1):
        segments += [number] * len(document)
    pad = 48 - len(row)
    packed = logits(decoder, [row + [7] * pad], [segments + [0] * pad])[0]
    start = 0
    for document in DOCUMENTS:
        alone = logits(decoder, [document])[0]
        assert largest(packed[start : start + len(document)], alone) < 1e-4
        start += len(document)
    run_on = logits(decoder, [row])[0]
    assert largest(run_on[17:26], packed[17:26]) > SEEN


def test_token_by_token(family):
    """With a cache, past the windows: the same hidden states as all at once."""
    _, _, _, decoder = family
    document = DOCUMENTS[0] + DOCUMENTS[2]
    whole = logits(decoder, [document])[0]
    caches, found = decoder.empty_caches(1, 32), []
    extend = jax.jit(decoder.extend)
    for start, end in ((0, 9), *((i, i + 1) for i in range(9, len(document)))):
        tokens = jnp.asarray([document[start:end]], jnp.int32)
        hidden, caches = extend(tokens, jnp.asarray(start), caches)
        found.append(decoder.logits(hidden)[0])
    assert largest(np.concatenate(found), whole) < 1e-4
    forgetful, _ = extend(tokens, jnp.asarray(0), decoder.empty_caches(1, 32))
    assert largest(decoder.logits(forgetful)[0, -1], whole[-1]) > SEEN


def test_adapter_through_peft_and_merged(family, tmp_path):
    """PEFT finds every key and no other, and computes ours; the merged folder computes the same."""
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    from jaxft.export import MergeConfig, merge

    _, folder, _, _ = family
    decoder = add_lora(load(folder))
    adapter = tmp_path / "adapter"
    config = AdapterConfig(4, 6.0, 0.0, PROJECTIONS, False, base_model_name_or_path=str(folder))
    save_adapter(adapter, config, adapter_arrays(decoder))
    got = np.asarray(logits(decoder, TOKENS))
    model = peft.PeftModel.from_pretrained(open_in_transformers(folder), adapter)
    weights = load_peft_weights(str(adapter), device="cpu")
    result = set_peft_model_state_dict(model, weights)
    assert result.unexpected_keys == []
    assert [key for key in result.missing_keys if "lora_" in key] == []
    assert largest(got, their_logits(model, TOKENS)) < 1e-4
    with model.disable_adapter():
        assert largest(got, their_logits(model, TOKENS)) > SEEN  # the control
    merged = tmp_path / "merged"
    merge(MergeConfig(adapter=str(adapter), output_dir=str(merged)))
    assert largest(got, their_logits(open_in_transformers(merged), TOKENS)) < 1e-4
    assert largest(got, logits(load(merged), TOKENS)) < 1e-4
