"""`jzero plan`: what each stage keeps and sends, at once and without devices."""

import argparse
import os

import jax
from rich.console import Console

from jzero import factory, targets
from jzero.cli.parser import (
    add_json,
    check_file,
    count,
    output,
    whole_number,
    whole_number_or_0,
    write_json,
)
from jzero.errors import JzeroError
from jzero.plan import deepspeed, report
from jzero.plan.leaves import Job, largest_module, lay_out, tokens_of
from jzero.plan.paper import OFFLOADS
from jzero.plan.plan import TOKENS, of_model, of_params
from jzero.plan.rows import DTYPE_BYTES
from jzero.targets import NODE, Target

NAME = "plan"
SUMMARY = "what each stage keeps on a device and sends, by formula or leaf by leaf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--params", type=count, metavar="N", help="parameters: 13e9, 13B, 125M")
    what.add_argument("--model", metavar="FILE.py:FACTORY", help="a factory of a jzero.Workload")
    add("--devices", type=whole_number, metavar="N", help="devices; by default the target's")
    add("--stage", type=int, choices=range(4), metavar="S", help="only this stage, 0 to 3")
    add("--target", metavar="T", help="devices to put it on, such as h100:8 or v5p:2x2x2")
    add("--dtype", choices=DTYPE_BYTES, help="of parameters and gradients (bf16)")
    add(
        "--grad-accum-dtype",
        choices=DTYPE_BYTES,
        help="of gradients summed over micro-batches (fp32)",
    )
    add(
        "--optimizer-bytes",
        type=whole_number_or_0,
        metavar="B",
        help="of optimizer state for a parameter, without master weights (8, for Adam)",
    )
    add("--accumulate", type=whole_number, metavar="A", help="micro-batches in a step (1)")
    add("--micro-batch", type=whole_number, metavar="B", help="with --model: samples a device (1)")
    add("--tokens", type=whole_number, metavar="T", help=f"a device and micro-batch ({TOKENS})")
    add("--offload", metavar="WHAT", help="optimizer, params, or both with a comma: to the host")
    add("--estimator", choices=["jzero", "deepspeed"], default="jzero", help="whose accounting")
    add(
        "--largest-layer",
        type=count,
        metavar="N",
        help="for DeepSpeed's estimator of stage 3: parameters of the largest layer",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Prints the plan that the arguments ask for.

    Raises:
      JzeroError: arguments that do not go together, or a model that jzero cannot use.
    """
    check_file("--json", args.json)
    _check(args)
    target = None if args.target is None else targets.parse(args.target)
    devices = _devices(args.devices, target)
    with output(args.json) as console:
        job = None if args.model is None else _job(args, devices)
        if args.estimator == "deepspeed":
            data = _deepspeed(args, devices, job, console)
        else:
            data = _plan(args, devices, job, target, console)
    write_json(args.json, data)


def _check(args: argparse.Namespace) -> None:
    """Refuses flags that would say nothing."""
    pairs = [
        ("model", "optimizer_bytes", "with --model the optimizer itself says"),
        ("model", "offload", "not yet with --model; with --params it is there"),
        ("model", "largest_layer", "with --model the model itself says"),
        ("params", "micro_batch", "only with --model; with --params give --tokens"),
    ]
    for one, other, why in pairs:
        if getattr(args, one) is not None and getattr(args, other) is not None:
            raise JzeroError(f"argument --{other.replace('_', '-')}: {why}")
    if args.tokens is not None and args.micro_batch is not None:
        raise JzeroError("argument --tokens: not with --micro-batch, which decides the tokens")
    if args.estimator == "deepspeed":
        for flag in ("target", "offload", "tokens", "micro_batch", "accumulate", "optimizer_bytes"):
            if getattr(args, flag) is not None:
                raise JzeroError(
                    f"argument --{flag.replace('_', '-')}: not with DeepSpeed's estimator"
                )
    elif args.largest_layer is not None:
        raise JzeroError("argument --largest-layer: only with --estimator deepspeed")


def _devices(given: int | None, target: Target | None) -> int:
    if target is None:
        if given is None:
            raise JzeroError("argument --devices: missing; give it, or a --target")
        return given
    if given is not None and given != target.count:
        raise JzeroError(
            f"argument --devices: {given}, but --target {target.name} has {target.count} devices; "
            f"leave one of them out"
        )
    return target.count


def _offload(text: str | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    for name in names:
        if name not in OFFLOADS:
            raise JzeroError(
                f"argument --offload: found {name!r}; allowed: {', '.join(OFFLOADS)}, or both "
                f"with a comma"
            )
    if text is not None and not names:
        raise JzeroError(f"argument --offload: nothing given; allowed: {', '.join(OFFLOADS)}")
    return names


def _job(args: argparse.Namespace, devices: int) -> Job:
    # Specs and traces need no devices: not even the plugins of those that are there are loaded.
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        jax.config.update("jax_platforms", "cpu")
    workload = factory.load(args.model)
    micro = args.micro_batch
    if args.tokens is not None:
        each = tokens_of(workload.batch(1))
        if each is None:
            raise JzeroError("argument --tokens: the model's batch has none; give --micro-batch")
        micro = max(1, round(args.tokens / each))
    try:
        return lay_out(workload, devices, args.accumulate, micro, args.dtype, args.grad_accum_dtype)
    except JzeroError as error:
        raise JzeroError(f"{args.model}: {error}") from error


def _plan(
    args: argparse.Namespace,
    devices: int,
    job: Job | None,
    target: Target | None,
    console: Console,
) -> dict[str, object]:
    if job is not None:
        plan = of_model(job, target)
    else:
        offload = _offload(args.offload)
        plan = of_params(
            args.params,
            devices,
            args.dtype or "bf16",
            args.grad_accum_dtype or "fp32",
            8 if args.optimizer_bytes is None else args.optimizer_bytes,
            args.accumulate or 1,
            offload,
            target,
            args.tokens or TOKENS,
        )
        if "params" in offload and args.stage != 3:
            console.print("Parameters go to the host at stage 3 alone, where they are sharded.")
    stages = range(4) if args.stage is None else (args.stage,)
    report.show(plan, console, stages)
    return plan.as_dict(stages)


def _deepspeed(
    args: argparse.Namespace, devices: int, job: Job | None, console: Console
) -> dict[str, object]:
    params, layer = args.params, args.largest_layer
    if job is not None:
        params, layer = job.params, largest_module(job)
    nodes = devices // NODE if devices % NODE == 0 else 1
    stages = [s for s in (2, 3) if args.stage in (None, s)]
    estimates = deepspeed.stage2(params, devices // nodes, nodes) if 2 in stages else []
    if 3 in stages:
        if layer is None:
            raise JzeroError(
                "argument --largest-layer: missing; DeepSpeed's estimator of stage 3 needs the "
                "parameters of the largest layer (or give --model, or --stage 2)"
            )
        estimates += deepspeed.stage3(params, layer, devices // nodes, nodes)
    every = range(4) if args.stage is None else (args.stage,)
    tuner = [(s, deepspeed.autotuner(params, s, devices, args.dtype == "fp32")) for s in every]
    report.show_estimates(estimates, tuner, console)
    return {
        "params": params,
        "devices": devices,
        "estimator": "deepspeed",
        "gpus_per_node": devices // nodes,
        "nodes": nodes,
        "largest_layer": layer,
        "rows": [estimate.as_dict() for estimate in estimates],
        "autotuner": [{"stage": stage, "device_bytes": n} for stage, n in tuner],
    }
