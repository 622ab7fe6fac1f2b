"""The figures of a model, leaf by leaf, from the specs that a run would have."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh

from jzero import config as configs
from jzero.config import Config
from jzero.errors import JzeroError
from jzero.explain import explain
from jzero.factory import one_line
from jzero.layout import Layout
from jzero.partition import STAGES, Leaf
from jzero.plan.rows import Row
from jzero.relayout import discover
from jzero.setup import Setup
from jzero.workload import Workload
from jzero.zero import Zero


@dataclass(frozen=True)
class Job:
    """A workload laid out on devices that need not be there.

    Attributes:
      workload: as the factory returned it.
      setup: its specs, at any stage, on an abstract mesh with one axis `data`.
      micro_batch: samples per device and micro-batch.
      accumulate: micro-batches in a step.
    """

    workload: Workload
    setup: Setup
    micro_batch: int
    accumulate: int

    @property
    def params(self) -> int:
        return sum(leaf.array.size for leaf in self.setup.layout.leaves.values())

    @property
    def batch(self) -> Any:
        """One micro-batch of all devices, as the loss is traced with."""
        return self.workload.batch(self.micro_batch * self.setup.mesh.data_size)


def lay_out(
    workload: Workload,
    devices: int,
    accumulate: int | None = None,
    micro_batch: int | None = None,
    dtype: str | None = None,
    grad_accum_dtype: str | None = None,
) -> Job:
    """The specs of a workload on so many devices; none is touched.

    Arguments:
      workload: what a factory returns.
      devices: of the mesh's one axis, `data`.
      accumulate, micro_batch: instead of the workload's configuration's, which are 1 if not given.
      dtype: "bf16", "fp16" or "fp32", instead of the configuration's.
      grad_accum_dtype: of the gradient accumulator, instead of the configuration's.

    Raises:
      JzeroError: a configuration, a model or a loss that jzero cannot use.
    """
    config = config_of(workload, devices, accumulate, micro_batch, dtype, grad_accum_dtype)
    zero = Zero(config, mesh=AbstractMesh((devices,), ("data",)))
    batch = zero.batch
    try:
        tx = optimizer_of(workload, config)
        setup = zero.setup_for(workload.init, tx, sample=workload.sample)
        job = Job(workload, setup, batch.micro or 1, batch.accumulation)
        # Only a loss tells of every model which axes are a layer scan's.
        found = discover(setup.region(workload.loss_fn, 1), setup.variables, job.batch)
    except JzeroError:
        raise
    except Exception as error:
        raise JzeroError(f"the workload cannot be traced: {one_line(error)}") from error
    if found:
        job = Job(workload, setup.with_layer_axes(found), job.micro_batch, job.accumulate)
    return job


def by_leaf(job: Job) -> list[Row]:
    """Bytes per device and elements sent at each stage, summed over the real leaves.

    Padding counts as it is stored and sent; leaves that stay whole are whole. `optimizer_bytes` is
    master weights, optimizer state and the rest of the state.

    Arguments:
      job: from `lay_out`.

    Returns:
      A row for each stage, 0 to 3; state and gradients equal `jzero.explain.stage_table`'s.
    """
    rows = []
    for stage in STAGES:
        at = job.setup.at_stage(stage)
        found = explain(at.layout, at.abstract_state(), accumulation=job.accumulate)
        kept = found.bytes_per_device
        rows.append(
            Row(
                stage=stage,
                params_bytes=kept["params"],
                gradients_bytes=found.gradient_bytes,
                optimizer_bytes=kept["master"] + kept["optimizer"] + kept["other"],
                comm_elements=sent(at.layout, job.accumulate, job.setup.config.keep_gathered),
            )
        )
    return rows


def sent(layout: Layout, accumulate: int, keep_gathered: bool = False) -> int:
    """Elements that a device sends in an optimizer step, without the ring's factor (N-1)/N.

    Arguments:
      layout: the leaves at one stage.
      accumulate: micro-batches in a step.
      keep_gathered: whether backward has the weights that forward gathered.
    """
    group, replicas = layout.mesh.group_size, layout.mesh.replicas
    gathers = accumulate * (1 if keep_gathered else 2)
    total = 0
    for path, leaf in layout.leaves.items():
        stored = stored_elements(leaf)
        if leaf.shard_parameter:
            total += gathers * stored
        if leaf.shard_state and not leaf.shard_parameter:
            total += stored  # the new parameter is gathered
        if path not in layout.differentiated:
            continue
        if leaf.shard_state:
            total += (accumulate if leaf.shard_gradient else 1) * stored  # reduce-scatter
            total += 2 * stored // group if replicas > 1 else 0  # shards reduced over replicas
        elif group > 1:
            total += 2 * leaf.array.size  # all-reduce, once in a step
            total += 2 * leaf.array.size if replicas > 1 else 0
    return total


def stored_elements(leaf: Leaf) -> int:
    return math.prod(leaf.stored_shape)


def largest_layer(job: Job) -> int:
    """Elements of the largest layer that a device has whole at once: one of a stack, or of a list.

    A leaf outside of any layer, such as an embedding, is a layer by itself.
    """
    return max(_layers(job).values(), default=0)


def largest_module(job: Job) -> int:
    """Parameters of the largest module without its children: DeepSpeed's largest layer."""
    modules: dict[str, int] = {}
    for path, leaf in job.setup.layout.leaves.items():
        parent = path.rpartition("/")[0]
        modules[parent] = modules.get(parent, 0) + leaf.array.layer_size
    return max(modules.values(), default=0)


def _layers(job: Job) -> dict[str, int]:
    layers: dict[str, int] = {}
    # At stage 3: persistent leaves are not gathered.
    for path, leaf in job.setup.at_stage(max(STAGES)).layout.leaves.items():
        if leaf.array.trained and leaf.shard_state and not leaf.shard_parameter:
            continue
        key = layer_of(leaf) or path
        layers[key] = layers.get(key, 0) + leaf.array.layer_size
    return layers


def layer_of(leaf: Leaf) -> str | None:
    """What names the layer that a leaf belongs to: its place in a list, or its stack's length."""
    names = leaf.path.split("/")
    for depth, name in enumerate(names):
        if name.isdigit():  # an entry of a list of layers
            return "/".join(names[: depth + 1])
    if leaf.array.layer_axes:
        length = [leaf.array.shape[axis] for axis in leaf.array.layer_axes]
        return f"{names[0]} x {length}"
    return None


def config_of(
    workload: Workload,
    devices: int,
    accumulate: int | None = None,
    micro_batch: int | None = None,
    dtype: str | None = None,
    grad_accum_dtype: str | None = None,
) -> Config:
    """A workload's configuration with sizes that go with `devices`, those that see different rows.

    What is given here comes first, then the configuration, then micro-batch 1 and accumulation 1.
    """
    given = workload.config
    options: dict[str, Any] = {"precision": dtype, "accumulation_dtype": grad_accum_dtype}
    if given is None:
        options["precision"] = dtype or "bf16"
        options["gradient_clipping"] = 1.0
    config = configs.load(given, **options)
    micro, steps = micro_batch or config.micro_batch_size, accumulate or config.accumulation
    if micro_batch is None and accumulate is None and config.train_batch_size is not None:
        return config  # its own batch sizes, which must go with the devices
    micro, steps = micro or 1, steps or 1
    return configs.load(
        config,
        micro_batch_size=micro,
        accumulation=steps,
        train_batch_size=micro * steps * devices,
    )


def optimizer_of(workload: Workload, config: Config) -> optax.GradientTransformation | None:
    """The workload's optimizer, or AdamW; None where the configuration has one."""
    if workload.tx is None and config.optimizer is None:
        return optax.adamw(1e-4)
    return workload.tx


def tokens_of(batch: Any) -> int | None:
    """Tokens in a batch: the elements of its largest leaf of integers; None where there is none."""
    leaves = [x for x in jax.tree.leaves(batch) if jnp.issubdtype(x.dtype, jnp.integer)]
    return max((x.size for x in leaves), default=None)
