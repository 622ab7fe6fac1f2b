"""Rules that say what somebody else calls a model's leaves: data that reads both ways."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jzero import factory
from jzero.checkpoint.sizes import is_size
from jzero.errors import JzeroError

Shapes = Mapping[str, tuple[int, ...]]
"""Leaf -> its shape."""

NameMap = Sequence[Mapping[str, Any]] | Callable[[Shapes], Sequence[Mapping[str, Any]]]
"""Rules, or a function of the model's leaves that returns them."""

PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")
"""A word in braces, which stands for a number."""


@dataclass(frozen=True)
class Rule:
    """One rule: whose leaf is whose tensor.

    `{layer}` (any word) stands for a number. Where it is in `ours` too, each leaf is a tensor;
    where it is in `theirs` alone, the leaf is stacked: its leading dimensions, one for each such
    word in their order, count the tensors.

    Attributes:
      ours: names of leaves; None for tensors that are to be left out of an import.
      theirs: names of tensors: the first, and those tied to it, which hold the same values; none
        for leaves that are to be left out of an export.
      transpose: the order of the dimensions in a tensor: True for the last two swapped.
      reshape: the shape that a leaf, or an entry of a stack, is given before it is transposed.
    """

    ours: str | None
    theirs: tuple[str, ...]
    transpose: bool | tuple[int, ...] = False
    reshape: tuple[int, ...] | None = None


def rules(name_map: NameMap, leaves: Shapes) -> list[Rule]:
    """The rules of a name map, checked each by itself.

    Raises:
      JzeroError: something that is not a rule.
    """
    given: Any = name_map(leaves) if callable(name_map) else name_map
    return [_rule(number, entry) for number, entry in enumerate(_list(given), start=1)]


def load(reference: str) -> NameMap:
    """A name map from a file.

    Arguments:
      reference: `FILE.json`, a list of rules, or `FILE.py:FUNCTION`, a function that is given the
        model's leaves (name -> shape) and returns such a list.

    Raises:
      JzeroError: a file that cannot be read, or has no such function.
    """
    if reference.endswith(".json"):
        try:
            found = json.loads(Path(reference).read_bytes())
        except FileNotFoundError:
            raise JzeroError(f"name map: no such file: {reference}") from None
        except OSError as error:
            raise JzeroError(f"name map: {reference}: {error.strerror}; give a file") from None
        except (ValueError, RecursionError) as error:
            raise JzeroError(f"name map: {reference}: is not JSON: {error}") from None
        return _list(found)
    path, name = factory.split(reference)
    function = getattr(factory.import_file(path, reference), name, None)
    if not callable(function):
        raise JzeroError(f"name map: {path} has no function {name!r}")

    def called(leaves: Shapes) -> Any:
        try:
            return function(leaves)
        except (Exception, SystemExit) as error:
            raise JzeroError(f"name map: {reference} raised {factory.one_line(error)}") from error

    return called


def _rule(number: int, entry: Any) -> Rule:
    where = f"name map: rule {number}"
    keys = {"ours", "theirs", "transpose", "reshape"}
    if not isinstance(entry, Mapping) or not {"ours", "theirs"} <= entry.keys() <= keys:
        raise JzeroError(
            f"{where} is {entry!r}; give ours and theirs, and perhaps transpose and reshape"
        )
    ours, theirs = entry["ours"], _names(entry["theirs"])
    if not isinstance(ours, str | None) or theirs is None:
        raise JzeroError(
            f"{where}: ours is a name or null, theirs a name, several in a list, or null"
        )
    if ours is None and not theirs:
        raise JzeroError(f"{where}: neither ours nor theirs is named")
    transpose, reshape = entry.get("transpose", False), entry.get("reshape")
    if not isinstance(transpose, bool):
        transpose = _numbers(transpose, f"{where}: transpose is true, or the order of dimensions")
    if reshape is not None:
        reshape = _numbers(reshape, f"{where}: reshape is a shape")
    if ours is not None and theirs:
        words = set(PLACE.findall(theirs[0]))
        if any(set(PLACE.findall(name)) != words for name in theirs[1:]):
            raise JzeroError(f"{where}: names that are tied have the same words in braces")
        if not set(PLACE.findall(ours)) <= words:
            raise JzeroError(f"{where}: {ours!r} has words in braces that {theirs[0]!r} has not")
    return Rule(ours, theirs, transpose, reshape)


def _list(given: Any) -> Sequence[Any]:
    if not isinstance(given, list | tuple):
        raise JzeroError(f"name map: {type(given).__name__}; give a list of rules")
    return given


def _names(theirs: Any) -> tuple[str, ...] | None:
    """The names in `theirs`, none of null; None where it is something else."""
    if theirs is None:
        return ()
    names = [theirs] if isinstance(theirs, str) else theirs
    if not isinstance(names, list | tuple) or not names:
        return None
    return tuple(names) if all(isinstance(name, str) for name in names) else None


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(map(is_size, value)):
        raise JzeroError(f"{what}, as in [0, 2, 1]; found {value!r}")
    return tuple(value)
