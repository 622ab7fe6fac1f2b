"""What a user's function takes, and whether it can be called as jzero calls it."""

import functools
import inspect
from typing import Any

from jzero.errors import JzeroError


def signature_of(fn: Any) -> inspect.Signature | None:
    """What a call of `fn` takes; None where Python does not know, as of some builtins."""
    base = fn.func if isinstance(fn, functools.partial) else fn
    if isinstance(base, type):  # a metaclass hides its constructor's signature
        given = (fn.args, fn.keywords) if isinstance(fn, functools.partial) else ((), {})
        fn = functools.partial(base.__init__, None, *given[0], **given[1])
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def check_call(
    fn: Any, name: str, *arguments: str, keywords: tuple[str, ...] = (), advice: str = ""
) -> None:
    """Whether a user's function can be called as jzero will.

    Arguments:
      fn: the function.
      name: what the user gave it as, like "loss_fn".
      arguments, keywords: names of what it is called with.
      advice: what to do where it cannot be.

    Raises:
      JzeroError: it is not callable, or takes other arguments.
    """
    call = f"{name}({', '.join([*arguments, *(f'{k}=' for k in keywords)])})"
    if not callable(fn):
        raise JzeroError(f"{name} is {fn!r:.60}; give a function {call}")
    signature = signature_of(fn)
    if signature is None:
        return
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        after = f"; {advice}" if advice else ""
        raise JzeroError(
            f"{name} is called as {call}, and takes {_short(signature)}: {error}{after}"
        ) from None


def _short(signature: inspect.Signature, most: int = 80) -> str:
    text = str(signature)
    return text if len(text) <= most else f"{text[: most - 5]} ...)"
