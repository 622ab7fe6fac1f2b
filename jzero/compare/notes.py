"""What is said of a compiled step beside its figures: needless traffic, and gathers that wait."""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import core

from jzero.compare.row import Traffic
from jzero.jaxpr_flow import REMAT
from jzero.plan.leaves import stored_elements
from jzero.probe import trace
from jzero.setup import Setup
from jzero.sharded import marked_shape
from jzero.units import percent, size
from jzero.workload import Workload

NOTABLE = 0.01
"""A share of traffic below which nothing is said."""


def notes(
    found: Sequence[Traffic], hidden: float | None, setup: Setup, workload: Workload, rows: int
) -> tuple[str, ...]:
    """All that there is to say of a compiled step.

    Arguments:
      found: its collectives.
      hidden: its `overlapped_fraction`.
      setup: what it was compiled with.
      workload: the loss and the batch.
      rows: of the global batch.
    """
    said = [reductions_for_scatters(found, setup)]
    if setup.config.stage == 3 and hidden is not None and hidden < 1 - NOTABLE:
        said.append(pinned_gathers(hidden, setup, workload, rows))
    return tuple(note for note in said if note is not None)


def reductions_for_scatters(found: Sequence[Traffic], setup: Setup) -> str | None:
    """Whether a compiler runs reduce-scatters as all-reduces, as XLA:TPU does on a 3-D torus.

    The layout says which gradients the step reduce-scatters. What is missing of them in the program
    can only be in its all-reduces over the same axes.
    """
    group = set(setup.mesh.shard_axes)
    asked = _scattered_elements(setup)
    over = [row for row in found if set(row.axes) <= group and row.elements and row.bytes]
    scatters = sum(row.elements or 0 for row in over if row.op == "reduce-scatter")
    reduces = [row for row in over if row.op == "all-reduce"]
    reduced = sum(row.elements or 0 for row in reduces)
    instead = min(asked - scatters, reduced)
    if instead <= NOTABLE * asked:
        return None
    # On a ring an all-reduce sends twice what a reduce-scatter does.
    more = round(sum(row.bytes or 0 for row in reduces) / 2 * instead / reduced)
    share = "" if instead >= (1 - NOTABLE) * asked else f"{percent(instead / asked)} of "
    return (
        f"this compiler runs {share}the step's reduce-scatters as all-reduces, which send twice "
        f"the bytes: {size(more)} more are sent than the stage asks for"
    )


def pinned_gathers(hidden: float, setup: Setup, workload: Workload, rows: int) -> str | None:
    """Whether the model's own remat keeps a layer's gathers from being fetched early.

    `jax.checkpoint` puts a barrier before the second forward pass unless it is told otherwise; a
    scan's two loops already keep the two apart.
    """
    region = setup.region(workload.loss_fn, 1)
    batch = workload.batch(rows)
    jaxpr = trace(region.trace, region.params, setup.variables, batch)
    layers = (eqn for eqn in _inside(jaxpr) if eqn.primitive.name == "scan")
    if not any(_pins(eqn) for scan in layers for eqn in _inside(scan.params["jaxpr"])):
        return None
    return (
        f"the model's remat pins each layer's gather in backward to its place ({hidden:.1%} of "
        f"the layers' traffic is hidden): inside a scan write jax.checkpoint(layer, "
        f"prevent_cse=False), or give nnx.remat or nn.remat the same argument"
    )


def _scattered_elements(setup: Setup) -> int:
    """Elements that a device hands to reduce-scatters in an optimizer step."""
    layout, total = setup.layout, 0
    for leaf in layout.differentiated.values():
        if leaf.shard_state:
            times = setup.batch.accumulation if leaf.shard_gradient else 1
            total += times * stored_elements(leaf) // layout.other_shards(leaf)
    return total


def _pins(eqn: Any) -> bool:
    """Whether an equation is a remat with a barrier that holds a read of a parameter."""
    if eqn.primitive.name != REMAT or eqn.params["prevent_cse"] is False:
        return False
    return any(
        each.primitive.name == "name" and marked_shape(each.params["name"]) is not None
        for each in _inside(eqn.params["jaxpr"])
    )


def _inside(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, closed or not, with those of the jaxprs that they hold."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from _inside(inner)
