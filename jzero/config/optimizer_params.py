"""The keys of `optimizer.params` and `scheduler.params`, one section per type."""

from typing import Annotated

from pydantic import BeforeValidator

from jzero.config.keys import Section, key, not_yet, notice, refused, works
from jzero.config.keys import Verdict as V
from jzero.config.values import (
    AboveZero,
    Betas,
    Count,
    Flag,
    Fraction,
    Number,
    Positive,
    Size,
    number,
    one_of,
)

Momentum = Annotated[float, BeforeValidator(number(least=0, most=1))]
WarmupType = Annotated[str, BeforeValidator(one_of("log", "linear"))]

_FUSED = "XLA fuses the update"


class AdamParams(Section):
    """`Adam`: AdamW unless `adam_w_mode` is false, as in DeepSpeed."""

    lr: Size = works(1e-3, "learning rate")
    betas: Betas = works([0.9, 0.999], "decay rates of the two moments")
    eps: Size = works(1e-8, "added to the root of the second moment")
    weight_decay: Size = works(0.0, "decoupled, or added to the gradient if adam_w_mode is false")
    bias_correction: Flag = not_yet(True, "moments are always corrected")
    adam_w_mode: Flag = works(True, "true: AdamW; false: Adam with L2 added to the gradient")
    amsgrad: Flag = refused(False, "DeepSpeed's Adam refuses it too")
    torch_adam: Flag = notice(False, "there is one implementation")
    set_grad_none: Flag = notice(True, "gradients are values")
    fused: Flag | None = notice(None, _FUSED)
    foreach: Flag | None = notice(None, _FUSED)
    fp32_optimizer_states: Flag = not_yet(True, "moments are float32")


class AdamWParams(AdamParams):
    """`AdamW`."""

    weight_decay: Size = works(0.0, "decoupled; the default is 0, as in DeepSpeed")
    adam_w_mode: Flag = notice(True, "AdamW is always decoupled", bites=lambda v: not v)


class LambParams(Section):
    """`Lamb`."""

    lr: Size = works(1e-3, "learning rate")
    betas: Betas = works([0.9, 0.999], "decay rates of the two moments")
    eps: Size = works(1e-8, "added to the root of the second moment")
    weight_decay: Size = works(0.0, "added to the update before the trust ratio")
    max_coeff: AboveZero = works(10.0, "the trust ratio is at most this")
    min_coeff: Size = works(0.01, "the trust ratio is at least this")
    bias_correction: Flag = not_yet(True, "moments are always corrected")
    eps_inside_sqrt: Flag = not_yet(False, "eps is added outside the root")
    amsgrad: Flag = refused(False, "DeepSpeed's Lamb refuses it too")


class LionParams(Section):
    """`Lion`."""

    lr: Size = works(1e-3, "learning rate")
    betas: Betas = works([0.9, 0.999], "weights of the momentum in the update and in itself")
    weight_decay: Size = works(0.0, "decoupled")
    set_grad_none: Flag = notice(True, "gradients are values")
    fp32_optimizer_states: Flag = not_yet(True, "momentum is float32")


class AdagradParams(Section):
    """`Adagrad`, as torch.optim has it."""

    lr: Size = works(1e-2, "learning rate")
    lr_decay: Size = not_yet(0.0, "use a schedule")
    weight_decay: Size = works(0.0, "added to the gradient")
    initial_accumulator_value: Size = works(0.0, "where the sum of squares starts")
    eps: Size = works(1e-10, "added to the root of the sum")
    maximize: Flag = refused(False, "losses are minimised")
    amsgrad: Flag = refused(False, "Adagrad has no such variant")


class MuonParams(Section):
    """`Muon`: matrices by Muon, everything else by Adam."""

    lr: Size | None = works(None, "learning rate of both parts, where theirs is not given")
    muon_lr: Size | None = works(None, "learning rate of the matrices; default lr, else 0.02")
    adam_lr: Size | None = works(None, "learning rate of the rest; default lr, else 3e-4")
    momentum: Momentum = works(0.95, "decay rate of Muon's momentum (Nesterov)")
    weight_decay: Size = works(0.0, "decoupled, in both parts")
    betas: Betas = works([0.9, 0.95], "decay rates of Adam's moments")
    eps: Size = works(1e-10, "added to the root of Adam's second moment")
    ns_method: Annotated[str, BeforeValidator(one_of("gram", "standard"))] = notice(
        "gram", "both name the same polynomial; it is iterated in float32"
    )


class SgdParams(Section):
    """`SGD`, as torch.optim has it."""

    lr: Size = works(1e-3, "learning rate")
    momentum: Momentum = works(0.0, "decay rate of the momentum")
    dampening: Number = not_yet(0.0, "gradients enter the momentum undamped")
    weight_decay: Size = works(0.0, "added to the gradient")
    nesterov: Flag = works(False, "Nesterov's momentum")
    maximize: Flag = refused(False, "losses are minimised")
    foreach: Flag | None = notice(None, _FUSED)
    fused: Flag | None = notice(None, _FUSED)


class WarmupLrParams(Section):
    """`WarmupLR`: warms up and stays. Step W = max(2, warmup_num_steps) is the first after it."""

    warmup_min_lr: Size = works(0.0, "rate at step 0")
    warmup_max_lr: Size | None = works(None, "rate after warming up; null is the optimizer's lr")
    warmup_num_steps: Positive = works(1000, "optimizer steps of warming up, at least 2")
    warmup_type: WarmupType = works(
        "log", "log (reaches the top at step W - 1) or linear (at step W)"
    )


class WarmupDecayLrParams(WarmupLrParams):
    """`WarmupDecayLR`: warms up, falls linearly to `warmup_min_lr` at `total_num_steps`, stays."""

    total_num_steps: Positive = works(..., "the step at which the decay has ended")
    warmup_max_lr: Size | None = works(1e-3, "rate after warming up; null is the optimizer's lr")


class WarmupCosineLrParams(Section):
    """`WarmupCosineLR`: multiplies the optimizer's lr; warms up, falls as a cosine, stays."""

    total_num_steps: Positive = works(..., "the step at which the decay has ended")
    warmup_min_ratio: Fraction = works(0.0, "ratio at step 0")
    warmup_num_steps: Positive = works(1000, "optimizer steps of warming up, at least 2")
    cos_min_ratio: Fraction = works(1e-4, "ratio at the end")
    warmup_type: WarmupType = works("log", "log or linear")


class OneCycleParams(Section):
    """`OneCycle`: up, down, then a slow decay of `cycle_min_lr` if asked for."""

    cycle_min_lr: Size = works(..., "rate at both ends of the cycle")
    cycle_max_lr: Size = works(..., "rate at the top of the cycle")
    decay_lr_rate: Size = works(
        0.0, "after the cycle, cycle_min_lr / (1 + rate * steps / step size)"
    )
    cycle_first_step_size: Positive = works(2000, "steps up")
    cycle_second_step_size: Positive | None = works(None, "steps down; null is as many as up")
    cycle_first_stair_count: Count = works(0, "stairs on the way up; 0 is a ramp")
    cycle_second_stair_count: Count | None = works(None, "stairs on the way down; null is as up")
    decay_step_size: Count = works(0, "steps over which decay_lr_rate acts once; 0 is no decay")
    cycle_momentum: Flag = key(
        True,
        V.REFUSE,
        "momentum does not cycle, and true is DeepSpeed's default; set it to false",
        bites=bool,
    )
    cycle_min_mom: Fraction = notice(0.8, "momentum does not cycle")
    cycle_max_mom: Fraction = notice(0.9, "momentum does not cycle")
    decay_mom_rate: Size = notice(0.0, "momentum does not cycle")


class LrRangeTestParams(Section):
    """`LRRangeTest`: a rate that only rises."""

    lr_range_test_min_lr: Size = works(1e-3, "rate at step 0")
    lr_range_test_step_size: Positive = works(2000, "steps per rise")
    lr_range_test_step_rate: Size = works(1.0, "each rise, as a multiple of the first rate")
    lr_range_test_staircase: Flag = works(False, "rise in stairs")


OPTIMIZERS: dict[str, type[Section]] = {
    "Adam": AdamParams,
    "AdamW": AdamWParams,
    "Lamb": LambParams,
    "Lion": LionParams,
    "Adagrad": AdagradParams,
    "Muon": MuonParams,
    "SGD": SgdParams,
}

SCHEDULERS: dict[str, type[Section]] = {
    "WarmupLR": WarmupLrParams,
    "WarmupDecayLR": WarmupDecayLrParams,
    "WarmupCosineLR": WarmupCosineLrParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LrRangeTestParams,
}

# Optimizers that DeepSpeed knows and jzero refuses, with the reason.
REFUSED_OPTIMIZERS = {
    "OneBitAdam": "it compresses gradients and DeepSpeed itself does not combine it with ZeRO",
    "ZeroOneAdam": "it compresses gradients and DeepSpeed itself does not combine it with ZeRO",
    "OneBitLamb": "it compresses gradients and DeepSpeed itself does not combine it with ZeRO",
    "MuAdam": "it needs the mup package's model",
    "MuAdamW": "it needs the mup package's model",
    "MuSGD": "it needs the mup package's model",
}
