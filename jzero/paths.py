"""Names of leaves: every part of jzero that speaks of a leaf gets its name here."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jzero.errors import JzeroError


def path_name(key_path: tuple[Any, ...]) -> str:
    """The name of a leaf: dict keys, list indices and attributes from the root, joined by "/".

    Arguments:
      key_path: a path as `jax.tree_util.tree_flatten_with_path` gives it.

    Example:
      >>> import jax
      >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({"layers": [{"kernel": 1}]})
      >>> path_name(path)
      'layers/0/kernel'
    """
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """The leaves of a pytree by name, in the tree's own order.

    Arguments:
      tree: any pytree; None and empty nodes have no leaves.
      is_leaf: as for `jax.tree.flatten`.

    Raises:
      JzeroError: two leaves have the same name, as in {"a": {"b": 1}, "a/b": 2}.
    """
    leaves: dict[str, Any] = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        name = path_name(key_path)
        if name in leaves:
            raise JzeroError(
                f"two leaves are both named {name!r}: a key that holds '/', or both the number "
                f"and the text of an index; rename one of them"
            )
        leaves[name] = leaf
    return leaves


def unflatten(like: Any, leaves: Mapping[str, Any]) -> Any:
    """The inverse of `flatten`: a tree of the same structure with other leaves.

    Arguments:
      like: the tree whose structure and names to use; None and empty nodes stay as they are.
      leaves: a value for each of its leaves by name; others are ignored.

    Raises:
      JzeroError: a leaf without a value.

    Example:
      >>> unflatten({"a": 1, "b": {"c": 2}, "d": None}, {"b/c": "C", "a": "A"})
      {'a': 'A', 'b': {'c': 'C'}, 'd': None}
    """
    key_paths, structure = jax.tree_util.tree_flatten_with_path(like)
    names = [path_name(key_path) for key_path, _ in key_paths]
    missing = [name for name in names if name not in leaves]
    if missing:
        raise JzeroError(f"no value for {', '.join(missing)}; there are {', '.join(leaves)}")
    return jax.tree.unflatten(structure, [leaves[name] for name in names])
