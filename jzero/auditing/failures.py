"""What a failed assertion says: what was found, each piece of it by name, and what to do."""

from collections.abc import Sequence

from jzero.auditing.arguments import root
from jzero.auditing.largest import Made
from jzero.auditing.lines import held, line, merged, over
from jzero.auditing.moved import Moved
from jzero.auditing.origins import Kind
from jzero.hlo import Memory
from jzero.hlo.known import added_up
from jzero.hlo.text import bits
from jzero.units import size

_GATHER = (
    "Gather the weight where it is used, so that the compiler has no choice: train with "
    "zero.train_step, or read each weight through jzero.gather in its loss."
)


def on_activations(found: Sequence[Moved], axes: str) -> str:
    """Of collectives that move activations."""
    sent = added_up(each.bytes for each in found)
    amount = "" if sent is None else f"; each device sends {size(sent)} of them a call"
    return "\n".join(
        [
            f"activations are moved over {axes}{amount}",
            *(f"  {line(each, each.bytes)}" for each in found),
            f"Such traffic grows with the batch, and is not ZeRO's. {_GATHER}",
        ]
    )


def on_unknown(found: Sequence[Moved], axes: str, unsure: Sequence[str]) -> str:
    """Of collectives that may move weights or activations."""
    how = "They are made from no argument: random numbers, or constants."
    if unsure:
        parts = {root(name) for each in found for name in each.arguments} or set(unsure)
        names = ", ".join(f'"{name}"' for name in sorted(parts))
        how = (
            f"Nothing says of {names} whether it is state or a batch. Name all arguments that are "
            f'state, or parts of them, as in jzero.audit(compiled, mesh, weights=["{min(parts)}"]).'
        )
    return "\n".join(
        [
            f"it cannot be told whether these are activations, moved over {axes}",
            *(f"  {line(each, each.bytes)}" for each in found),
            f"{how} Or allow_unknown=True lets them pass.",
        ]
    )


def unknown_volume(lost: Sequence[Moved]) -> str:
    """Of collectives without a figure."""
    return "\n".join(
        [
            "the volume cannot be told: the program does not say how often these run, or over what",
            *(f"  {line(each, each.bytes)}" for each in merged(lost)),
        ]
    )


def volume(
    sent: Sequence[tuple[Moved, float]], found: float, ratio: float, tolerance: float, unit: str
) -> str:
    """Of a volume that is not the one asked for.

    Arguments:
      sent: what is moved, and its part of the volume in the unit.
      found: all of it.
      ratio, tolerance: what was asked for.
      unit: in words.
    """
    parts: dict[tuple[str, str, str, str], float] = {}
    for each, amount in sent:
        key = each.op, each.kind.value, over(each.axes), each.dtype
        parts[key] = parts.get(key, 0) + amount
    lines = [
        f"each device sends {found:.3f} times {unit}; asked for was {ratio:g} within "
        f"{tolerance:.1%}"
    ]
    for (op, kind, axes, dtype), amount in sorted(parts.items(), key=lambda item: -item[1]):
        lines.append(f"  {amount:.3f}  {op}, {kind}, {dtype} over {axes}")
    activations = sum(part for each, part in sent if each.kind is Kind.ACTIVATION)
    if activations:
        lines.append(f"{activations:.3f} of it is activations. {_GATHER}")
    return "\n".join(lines)


def peak(memory: Memory, limit: int, made: Sequence[Made], weights: Sequence[Moved]) -> str:
    """Of a peak of `limit` bytes or more."""
    fresh = memory.output_bytes - memory.alias_bytes
    lines = [
        f"the peak is {size(memory.peak_bytes)}, and should be below {size(limit)}",
        f"  {size(memory.argument_bytes)} of arguments",
        f"  {size(memory.temp_bytes)} of temporaries",
        f"  {size(fresh)} of outputs that overwrite no argument",
        "the largest arrays that the program makes, not all at once",
    ]
    for each in made:
        behind = ", ".join(filter(None, [each.op_name, each.line])) or "no operation's name"
        lines.append(f"  {each.shape}, {size(each.shape.bytes)}: {behind}")
    if fresh * 2 > memory.argument_bytes:
        lines.append("Donate the state (donate_argnums), so that it is updated in place.")
    return "\n".join([*lines, *([kept(weights)] if weights else [])])


def kept(weights: Sequence[Moved]) -> str:
    """Of gathered weights that are kept for backward."""
    total = held(weights)
    amount = "" if total is None else f", {size(total)} at least"
    return "\n".join(
        [
            f"gathered weights are kept from forward for backward{amount}",
            *(f"  {line(each, held([each]))}" for each in merged(weights)),
            "Gather them again in backward: zero.train_step does; in a loss of your own, put the "
            "layer, its gather included, under jax.checkpoint.",
        ]
    )


def sent(each: Moved, itemsize: int | None) -> float:
    """What a device sends of it, in elements of its own dtype or of `itemsize` bytes."""
    return (each.bytes or 0) / (itemsize or bits(each.dtype) / 8)
