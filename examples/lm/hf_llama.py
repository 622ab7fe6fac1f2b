"""The example's model as Hugging Face's Llama: names of weights, and `config.json`, both ways.

    jzero checkpoint export runs/a/checkpoints llama --name-map examples/lm/hf_llama.py:name_map
    python examples/lm/hf_llama.py llama --model tiny

The first line writes the weights, the second config.json beside them; then `transformers` loads the
folder. The other way, with `lm_config` for the sizes and this name map again:

    jzero checkpoint import imported llama --model FILE.py:FACTORY \
        --name-map examples/lm/hf_llama.py:name_map

Both models turn the pairs (c, c + C/2) of a head for its position, so no weight is permuted; Meta's
own files of Llama pair (2c, 2c + 1) and are not what this map reads.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model import PRESETS, LMConfig

from jzero.errors import JzeroError

LAYER = "model.layers.{layer}."
LINEARS = {
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/out": "self_attn.o_proj",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
EPSILON = 1e-5  # of `rms_norm`


def name_map(leaves: Mapping[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    """The rules for a model with these leaves: scanned or unrolled, tied or not.

    A kernel [inputs, outputs] is torch's weight [outputs, inputs]. A tied embedding is written
    under the head's name too.
    """
    layers = "layers/" if "layers/mlp/up/kernel" in leaves else "layers/{layer}/"
    tied = "head/kernel" not in leaves
    embedding = "model.embed_tokens.weight"
    rules: list[dict[str, Any]] = [
        {"ours": "embed/embedding", "theirs": [embedding, "lm_head.weight"] if tied else embedding},
        {"ours": "norm/scale", "theirs": "model.norm.weight"},
        # Older files hold what can be computed.
        {"ours": None, "theirs": f"{LAYER}self_attn.rotary_emb.inv_freq"},
    ]
    if not tied:
        rules.append({"ours": "head/kernel", "theirs": "lm_head.weight", "transpose": True})
    for ours, theirs in LINEARS.items():
        name = f"{LAYER}{theirs}.weight"
        rules.append({"ours": f"{layers}{ours}/kernel", "theirs": name, "transpose": True})
    for ours, theirs in NORMS.items():
        rules.append({"ours": f"{layers}{ours}/scale", "theirs": f"{LAYER}{theirs}.weight"})
    return rules


def hf_config(config: LMConfig) -> dict[str, Any]:
    """What `config.json` says of a model of these sizes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.mlp,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": config.rope_base,
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "mlp_bias": False,
        # Token 0 comes before each document.
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def lm_config(path: Path) -> LMConfig:
    """The sizes that a Llama's `config.json` gives.

    Raises:
      JzeroError: a model that this one is not: other rotary frequencies, biases, another epsilon.
    """
    said = json.loads(path.read_text(encoding="utf-8"))
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    config = LMConfig(
        vocabulary=said["vocab_size"],
        context=said["max_position_embeddings"],
        layers=said["num_hidden_layers"],
        width=said["hidden_size"],
        heads=said["num_attention_heads"],
        kv_heads=said.get("num_key_value_heads") or said["num_attention_heads"],
        mlp=said["intermediate_size"],
        tied=said.get("tie_word_embeddings", False),
        rope_base=float(rope.get("rope_theta") or said.get("rope_theta") or 10_000.0),
    )
    found = {
        "model_type": said.get("model_type"),
        "hidden_act": said.get("hidden_act", "silu"),
        "rms_norm_eps": said.get("rms_norm_eps", 1e-6),
        "head_dim": said.get("head_dim") or config.head_width,
        "attention_bias": said.get("attention_bias", False),
        "mlp_bias": said.get("mlp_bias", False),
        "rope_type": rope.get("rope_type", rope.get("type", "default")),
    }
    for key, value in found.items():
        needed = {**hf_config(config), "rope_type": "default"}[key]
        if value != needed:
            raise JzeroError(f"{path}: {key} is {value!r}; examples/lm/model.py has {needed!r}")
    return config


def main() -> int:
    parser = argparse.ArgumentParser(prog="hf_llama.py", description="Write config.json.")
    parser.add_argument("folder", type=Path, help="where `jzero checkpoint export` put the weights")
    parser.add_argument("--model", choices=PRESETS, required=True, help="the preset")
    args = parser.parse_args()
    if not args.folder.is_dir():
        parser.error(f"{args.folder}: no such folder")
    text = json.dumps(hf_config(PRESETS[args.model]), indent=2) + "\n"
    (args.folder / "config.json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
