"""What a user's function takes, and whether it can be called as jzero calls it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from jzero.errors import JzeroError


def signature_of(fn: Any, follow_wrapped: bool = True) -> inspect.Signature | None:
    """What a call of `fn` takes; None where Python does not know, as of some builtins.

    Arguments:
      fn: a function, a class, or a `functools.partial` of one.
      follow_wrapped: of a decorated function, what the function inside takes; the decorator may
        supply some of it.
    """
    base = fn.func if isinstance(fn, functools.partial) else fn
    if isinstance(base, type):  # a metaclass hides its constructor's signature
        given = (fn.args, fn.keywords) if isinstance(fn, functools.partial) else ((), {})
        fn = functools.partial(base.__init__, None, *given[0], **given[1])
    try:
        return inspect.signature(fn, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):
        return None


def check_call(fn: Any, name: str, *arguments: str) -> None:
    """Whether a user's function can be called as jzero will.

    Arguments:
      fn: the function.
      name: what the user gave it as, like "loss_fn".
      arguments: names of what it is called with.

    Raises:
      JzeroError: it is not callable, or takes other arguments.
    """
    if not callable(fn):
        raise JzeroError(f"{name} is {fn!r:.60}; give a function {name}({', '.join(arguments)})")
    if wrong := _mismatch(fn, name, arguments):
        raise JzeroError(wrong)


def explained(
    fn: Callable[..., Any], name: str, *arguments: str, advice: str
) -> Callable[..., Any]:
    """The same function, which says so where it fails because it takes other arguments.

    Not before it is called: a class may take what its constructor does not.

    Arguments:
      fn, name, arguments: as `check_call` takes them; "rngs=" is passed by name.
      advice: what to do.
    """

    def call(*args, **keywords):
        try:
            return fn(*args, **keywords)
        except TypeError as error:
            wrong = _mismatch(fn, name, arguments)
            if wrong is None:
                raise
            raise JzeroError(f"{wrong}; {advice}") from error

    return call


def _mismatch(fn: Any, name: str, arguments: tuple[str, ...]) -> str | None:
    signature = signature_of(fn, follow_wrapped=False)
    if signature is None:
        return None
    keywords = {x.rstrip("="): None for x in arguments if x.endswith("=")}
    try:
        signature.bind(*(x for x in arguments if not x.endswith("=")), **keywords)
    except TypeError as error:
        takes = str(signature)
        takes = takes if len(takes) <= 80 else f"{takes[:75]} ...)"
        return f"{name} is called as {name}({', '.join(arguments)}), and takes {takes}: {error}"
    return None
