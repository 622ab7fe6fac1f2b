"""The example's weights as Hugging Face's Llama: the same model there, and back here.

The proof needs `transformers` and torch, which the tests do not install:

    pip install torch transformers && pytest tests/examples/test_lm_llama.py
"""

import importlib.util
import json
import sys
from dataclasses import replace

import hf_llama
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from model import LM, PRESETS, LMConfig

import jzero
from jzero.checkpoint import export_safetensors, import_safetensors
from jzero.checkpoint.counterparts import counterparts
from jzero.errors import JzeroError
from jzero.paths import flatten, unflatten

# Grouped queries, another base; nothing divides the vocabulary.
SMALL = LMConfig(97, 16, layers=3, width=32, heads=4, kv_heads=2, mlp=48, rope_base=5e5)
TIED, UNROLLED = replace(SMALL, tied=True), replace(SMALL, scan=False)
MOST = 40_000  # bytes of a file: a few files

proof = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "torch"))),
    reason="needs transformers and torch, which the tests do not install",
)


def leaves_of(config):
    """A model's structure, and its leaves' shapes by name."""
    graph, params = nnx.split(nnx.eval_shape(lambda: LM(config, rngs=nnx.Rngs(0))))
    return graph, params, flatten(nnx.to_pure_dict(params))


def model_of(config, draw):
    graph, params, leaves = leaves_of(config)
    drawn = {name: jnp.asarray(draw(name, x.shape), jnp.float32) for name, x in leaves.items()}
    nnx.replace_by_pure_dict(params, unflatten(nnx.to_pure_dict(params), drawn))
    return nnx.merge(graph, params)


def weights(config):
    """Weights large enough that each of them shows in the logits, those of norms too."""
    rng = np.random.default_rng(0)
    around = {True: (1, 0.3), False: (0, 0.2)}
    return model_of(config, lambda name, shape: rng.normal(*around["norm" in name], shape))


def sharded():
    """Stage 3 on eight devices, small leaves too: the vocabulary is stored padded."""
    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return jzero.Zero({"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage})


def export(config, folder, dtype=None):
    """Saves a model's weights and exports them, with config.json."""
    zero = sharded()
    state = zero.init(weights(config), optax.adam(1e-3))
    with zero.checkpointer(folder / "run") as checkpoints:
        checkpoints.save(state, force=True)
    out = folder / "llama"
    names = hf_llama.name_map
    export_safetensors(folder / "run", out, dtype=dtype, name_map=names, max_shard_bytes=MOST)
    (out / "config.json").write_text(json.dumps(hf_llama.hf_config(config)))
    return out


def restored(config, source, folder):
    """A model with weights that are imported and restored, sharded."""
    zero = sharded()
    nothing = model_of(config, lambda name, shape: np.zeros(shape))
    state = zero.init(nothing, optax.adam(1e-3))
    import_safetensors(source, folder, zero.setup, name_map=hf_llama.name_map)
    found = zero.checkpointer(folder).restore(parts=("params",), base=state)
    assert found is not None
    return zero, found.state


TOKENS = np.random.default_rng(1).integers(0, SMALL.vocabulary, (2, SMALL.context))


def here(model):
    return np.asarray(jax.jit(lambda tokens: model(tokens))(jnp.asarray(TOKENS)))


def there(folder, dtype="float32"):
    """Logits of transformers' model."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.float().numpy()


def close(a, b, of_largest):
    """Differences are at most so much of the largest logit."""
    assert np.abs(b).max() > 1
    np.testing.assert_allclose(a, b, rtol=0, atol=of_largest * np.abs(b).max())


@pytest.mark.parametrize("config", [TIED, UNROLLED], ids=["tied", "unrolled"])
def test_an_export_comes_back_bit_for_bit(config, tmp_path):
    out = export(config, tmp_path)
    assert len(list(out.glob("*.safetensors"))) > 1
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" in index["weight_map"]
    assert "model.layers.2.self_attn.k_proj.weight" in index["weight_map"]
    zero, state = restored(config, out, tmp_path / "again")
    before = flatten(nnx.to_pure_dict(nnx.state(weights(config))))
    after = flatten(zero.params(state))
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


@proof
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("config", [TIED, UNROLLED], ids=["tied", "unrolled"])
def test_transformers_computes_the_same_logits(config, tmp_path):
    # Both compute in float32, and sum in their own order.
    close(there(export(config, tmp_path)), here(weights(config)), 1e-5)


@proof
@pytest.mark.filterwarnings("default")
def test_transformers_computes_the_same_logits_in_bf16(tmp_path):
    out = export(TIED, tmp_path, dtype="bfloat16")
    model = weights(TIED)
    params = nnx.state(model)
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params))
    close(there(out), here(model), 1e-5)  # the files' weights, in float32
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    # Activations are rounded to 2**-9 some dozens of times, and not at the same places.
    close(there(out, "bfloat16"), here(model).astype(np.float32), 0.05)


@proof
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_model_of_transformers_computes_the_same_logits_here(tied, tmp_path):
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{key: x for key, x in hf_llama.hf_config(replace(SMALL, tied=tied)).items()},
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1, 0.3)
    model.save_pretrained(tmp_path / "llama", max_shard_size=MOST)
    assert (tmp_path / "llama" / "model.safetensors.index.json").is_file()
    found = hf_llama.lm_config(tmp_path / "llama" / "config.json")
    assert found == replace(SMALL, tied=tied)
    zero, state = restored(found, tmp_path / "llama", tmp_path / "run")
    close(here(zero.model(state)), there(tmp_path / "llama"), 1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_the_map_has_every_leaf_of_every_preset(name):
    config = replace(PRESETS[name], layers=2)
    shapes = {leaf: x.shape for leaf, x in leaves_of(config)[2].items()}
    found = counterparts(hf_llama.name_map, shapes)
    head = () if config.tied else ("lm_head.weight",)
    assert len(found) == 9 * config.layers + 2 + len(head)
    assert {t for x in found for t in x.names} >= {"lm_head.weight", "model.norm.weight"}
    up = next(x for x in found if x.names[0] == "model.layers.1.mlp.up_proj.weight")
    assert up.their_shape == (config.mlp, config.width)


def test_sizes_go_to_config_json_and_back(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hf_llama.py", str(tmp_path), "--model", "tiny"])
    assert hf_llama.main() == 0
    assert hf_llama.lm_config(tmp_path / "config.json") == PRESETS["tiny"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06; examples/lm/model.py has 1e-05"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type is 'llama3'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"head_dim": 64}, "head_dim is 64"),
    ],
)
def test_another_model_is_refused(change, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**hf_llama.hf_config(SMALL), **change}))
    with pytest.raises(JzeroError, match=message):
        hf_llama.lm_config(path)
