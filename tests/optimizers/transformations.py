"""Every transformation of optax and optax.contrib, found in the modules, so that new ones are too.

Whoever adds one to Optax that needs arguments makes `test_every_alias_is_covered` fail: give it a
row here.
"""

import inspect
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import optax.contrib

LR = 0.01


def _key():
    return jax.random.key(3)


def _some(params):
    """A mask, a tree of booleans."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[0].key in ("embed", "norm"), params
    )


def _labels(params):
    return jax.tree.map(lambda on: "on" if on else "off", _some(params))


def _two():
    return {"on": optax.adam(LR), "off": optax.set_to_zero()}


# Arguments where the defaults (and learning_rate) do not do.
ARGUMENTS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adafactor": lambda: optax.adafactor(LR, min_dim_size_to_factor=8),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_noise": lambda: optax.add_noise(0.1, 0.5, key=_key()),
    "apply_every": lambda: optax.apply_every(2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(LR), 3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LR)),
    "clip": lambda: optax.clip(0.1),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.1),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.1),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adam(LR), lambda n: n > 0),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.adam(LR), lambda n: n > 0
    ),
    "differentially_private_aggregate": lambda: optax.contrib.differentially_private_aggregate(
        1.0, 0.1, key=_key()
    ),
    "dpsgd": lambda: optax.contrib.dpsgd(LR, 1.0, 0.1, seed=3, momentum=0.9),
    "ema": lambda: optax.ema(0.9),
    "flatten": lambda: optax.flatten(optax.adam(LR)),
    "freeze": lambda: optax.freeze(True),
    "galore": lambda: optax.contrib.galore(LR, rank=8),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(LR),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adamw)(LR),
    "lbfgs": lambda: optax.lbfgs(LR, 2, linesearch=optax.scale_by_backtracking_linesearch(2)),
    "lookahead": lambda: optax.lookahead(optax.adam(LR), 2, 0.5),
    "masked": lambda: optax.masked(optax.adam(LR), _some),
    "measure_with_ema": lambda: optax.measure_with_ema(lambda updates: updates, 0.9),
    "mechanize": lambda: optax.contrib.mechanize(optax.adam(LR)),
    "multi_transform": lambda: optax.multi_transform(_two(), _labels),
    "named_chain": lambda: optax.named_chain(("a", optax.adam(LR)), ("b", optax.ema(0.9))),
    "noisy_sgd": lambda: optax.noisy_sgd(LR, key=_key()),
    "partition": lambda: optax.partition(_two(), _labels),
    "sam": lambda: optax.contrib.sam(optax.adam(LR), optax.sgd(LR)),
    "scale": lambda: optax.scale(-LR),
    "scale_by_backtracking_linesearch": lambda: optax.scale_by_backtracking_linesearch(3),
    "scale_by_galore": lambda: optax.contrib.scale_by_galore(rank=8),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda count: 0.1 / (1 + count)),
    "scale_by_zoom_linesearch": lambda: optax.scale_by_zoom_linesearch(3),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.adam(LR), LR),
    "selective_transform": lambda: optax.selective_transform(optax.adam(LR), freeze_mask=True),
    "sgd": lambda: optax.sgd(LR, momentum=0.9),
    "snapshot": lambda: optax.snapshot("norm", optax.tree.norm),
    "split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(optax.adam(LR)),
    "stateless": lambda: optax.stateless(lambda updates, params: updates),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, p: -LR * u),
    "trace": lambda: optax.trace(0.9),
    "with_extra_args_support": lambda: optax.with_extra_args_support(optax.adam(LR)),
    # Not aliases, but as common.
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(LR), 2).gradient_transformation(),
    "adam_with_ema_of_updates": lambda: optax.chain(optax.adam(LR), optax.ema(0.999)),
    "masked_muon": lambda: optax.masked(optax.contrib.muon(LR), _some),
    "injected_chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.lamb)(LR)
    ),
    "momentum_in_bf16": lambda: optax.adam(LR, mu_dtype=jnp.bfloat16),
}

# Their init fails on a tree with None in it.
WITHOUT_NONE = ("galore", "scale_by_galore")

# Their update takes something else than gradients of the parameters' shapes.
NOT_UPDATED = {
    "lookahead": "takes pairs of fast and slow parameters",
    "dpsgd": "takes a gradient for each sample",
    "differentially_private_aggregate": "takes a gradient for each sample",
}


def aliases() -> dict[str, Callable]:
    """name -> the function, for all that return a transformation."""
    found = {}
    for module in (optax, optax.contrib):
        for name, value in vars(module).items():
            if name.startswith("_") or inspect.isclass(value) or not callable(value):
                continue
            try:
                returned = str(inspect.signature(value).return_annotation)
            except (TypeError, ValueError):
                continue
            if "GradientTransformation" in returned:
                found[name] = value
    return found


def make(name: str) -> optax.GradientTransformation:
    with warnings.catch_warnings():  # the deprecated ones are there for users who still have them
        warnings.simplefilter("ignore", DeprecationWarning)
        if name in ARGUMENTS:
            return ARGUMENTS[name]()
        function = aliases()[name]
        required = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        unknown = set(required) - {"learning_rate"}
        assert not unknown, f"optax.{name} needs {sorted(unknown)}: add it to ARGUMENTS"
        return function(LR) if required else function()


NAMES = sorted(aliases().keys() | ARGUMENTS.keys())


def extra_arguments(name: str, loss: Callable, params, grads) -> dict:
    """What else the update of a transformation takes."""
    if "polyak" in name or "momo" in name or name == "reduce_on_plateau":
        return {"value": loss(params)}
    if "lbfgs" == name or "linesearch" in name:
        return {"value": loss(params), "grad": grads, "value_fn": loss}  # grads: of that loss
    if name == "sophia":
        return {"obj_fn": loss}
    return {}
