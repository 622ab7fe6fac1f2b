"""What a model's leaves are to somebody else: tensors of other names and shapes."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jzero.checkpoint.name_map import PLACE, NameMap, Rule, Shapes, rules
from jzero.errors import JzeroError


@dataclass(frozen=True)
class Counterpart:
    """A tensor of theirs that is a leaf, or one entry of a leaf's leading dimensions.

    Attributes:
      leaf: the leaf's name.
      index: the entry; empty for the leaf as a whole.
      names: the tensor's; the first, and those tied to it.
      shape: of the leaf or the entry.
      reshaped: its shape before the transposition.
      order: the transposition.
    """

    leaf: str
    index: tuple[int, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    reshaped: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def their_shape(self) -> tuple[int, ...]:
        return tuple(self.reshaped[d] for d in self.order)

    def to_theirs(self, values: np.ndarray) -> np.ndarray:
        """Values of our shape, in the tensor's."""
        return values.reshape(self.reshaped).transpose(self.order)

    def to_ours(self, values: np.ndarray) -> np.ndarray:
        """Values of the tensor's shape, in ours."""
        return values.transpose(np.argsort(self.order)).reshape(self.shape)


def counterparts(name_map: NameMap | None, leaves: Shapes) -> list[Counterpart]:
    """The tensors that a model's leaves are to somebody else.

    Arguments:
      name_map: rules, or a function that gives them; None for jzero's own names and shapes.
      leaves: the model's parameters: name -> shape.

    Returns:
      Leaf by leaf, in the leaves' order; leaves that a rule leaves out have none.

    Raises:
      JzeroError: a rule for a leaf that is not there, a leaf without a rule, a name given twice, a
        shape that a rule does not fit.
    """
    if name_map is None:
        return [
            Counterpart(leaf, (), (leaf,), shape, shape, tuple(range(len(shape))))
            for leaf, shape in leaves.items()
        ]
    chosen: dict[str, tuple[Rule, dict[str, str]]] = {}
    for rule in rules(name_map, leaves):
        if rule.ours is None:
            continue
        found = {
            leaf: m.groupdict() for leaf in leaves if (m := _pattern(rule.ours).fullmatch(leaf))
        }
        if not found:
            raise JzeroError(f"name map: {rule.ours!r} is not a leaf; there are {some(leaves)}")
        for leaf, numbers in found.items():
            if leaf in chosen:
                raise JzeroError(f"name map: two rules are for the leaf {leaf!r}")
            chosen[leaf] = rule, numbers
    without = [leaf for leaf in leaves if leaf not in chosen]
    if without:
        raise JzeroError(
            f"name map: no rule for {some(without)}; to leave a leaf out give it null as `theirs`"
        )
    found = [
        tensor
        for leaf, shape in leaves.items()
        if chosen[leaf][0].theirs
        for tensor in _of_leaf(chosen[leaf][0], leaf, chosen[leaf][1], shape)
    ]
    of: dict[str, str] = {}
    for tensor in found:
        for name in tensor.names:
            if name in of:
                raise JzeroError(
                    f"name map: {name!r} is given twice, for {of[name]!r} and {tensor.leaf!r}"
                )
            of[name] = tensor.leaf
    return found


def left_out(name_map: NameMap | None, leaves: Shapes, names: Iterable[str]) -> set[str]:
    """Of somebody else's tensors, those that the rules leave out of an import."""
    if name_map is None:
        return set()
    patterns = [_pattern(t) for r in rules(name_map, leaves) if r.ours is None for t in r.theirs]
    return {name for name in names if any(p.fullmatch(name) for p in patterns)}


def _pattern(name: str) -> re.Pattern[str]:
    """A rule's name as a regular expression."""
    parts = PLACE.split(name)
    seen: set[str] = set()
    text = ""
    for literal, word in zip(parts[::2], [*parts[1::2], None], strict=True):
        text += re.escape(literal)
        if word is not None:
            text += rf"(?P={word})" if word in seen else rf"(?P<{word}>\d+)"
            seen.add(word)
    return re.compile(text)


def _of_leaf(
    rule: Rule, leaf: str, numbers: Mapping[str, str], shape: tuple[int, ...]
) -> Iterator[Counterpart]:
    words = list(dict.fromkeys(w for w in PLACE.findall(rule.theirs[0]) if w not in numbers))
    if len(words) > len(shape):
        raise JzeroError(
            f"name map: {leaf} has shape {list(shape)}: no leading dimension for each of "
            f"{', '.join(words)} in {rule.theirs[0]!r}"
        )
    for index in np.ndindex(*shape[: len(words)]):
        at = {**numbers, **{word: str(i) for word, i in zip(words, index, strict=True)}}
        yield _counterpart(rule, leaf, at, shape[len(words) :], index)


def _counterpart(
    rule: Rule,
    leaf: str,
    numbers: Mapping[str, str],
    shape: tuple[int, ...],
    index: tuple[int, ...],
) -> Counterpart:
    names = tuple(PLACE.sub(lambda m: numbers[m[1]], name) for name in rule.theirs)
    reshaped = shape if rule.reshape is None else rule.reshape
    if math.prod(reshaped) != math.prod(shape):
        raise JzeroError(f"name map: {leaf}: {list(shape)} cannot be reshaped to {list(reshaped)}")
    order = tuple(range(len(reshaped)))
    if rule.transpose is True:
        if len(order) < 2:
            raise JzeroError(f"name map: {leaf}: {list(reshaped)} has no two dimensions to swap")
        order = (*order[:-2], order[-1], order[-2])
    elif rule.transpose:
        if sorted(rule.transpose) != list(order):
            raise JzeroError(
                f"name map: {leaf}: transpose {list(rule.transpose)} is no order of the "
                f"dimensions of {list(reshaped)}"
            )
        order = rule.transpose
    return Counterpart(leaf, index, names, shape, reshaped, order)


def some(names: Iterable[str]) -> str:
    """Names in a sentence: ten at most."""
    names = list(names)
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
