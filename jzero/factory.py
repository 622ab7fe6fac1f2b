"""Loading a user's `FILE.py:FACTORY`, which describes a training job to jzero's tools."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from jzero.calls import signature_of
from jzero.errors import JzeroError
from jzero.workload import Workload


def load(reference: str) -> Workload:
    """The workload that a factory in a Python file returns.

    Arguments:
      reference: `FILE.py:FACTORY`. The file is imported with its own folder importable, so that it
        finds the modules beside it; FACTORY is a callable in it without required arguments.

    Returns:
      What the factory returns; it makes no arrays and touches no device.

    Raises:
      JzeroError: in one line, what is missing or what went wrong in the file or the factory.
    """
    path, name = split(reference)
    module = import_file(path, reference)
    factory = getattr(module, name, None)
    if factory is None:
        raise JzeroError(f"{reference}: {path} has no {name!r}; {_there_are(module)}")
    if not callable(factory):
        raise JzeroError(
            f"{reference}: {name} is {_article(factory)}, not a factory; {_there_are(module)}"
        )
    needed = _required(factory)
    if needed:
        raise JzeroError(
            f"{reference}: {name} needs arguments ({', '.join(needed)}); a factory is called "
            f"without any"
        )
    try:
        workload = factory()
    except JzeroError as error:
        raise JzeroError(f"{reference}: {error}") from error
    except (Exception, SystemExit) as error:
        raise JzeroError(f"{reference}: {name}() raised {one_line(error)}") from error
    if not isinstance(workload, Workload):
        raise JzeroError(
            f"{reference}: {name}() returned {_article(workload)}; a factory returns a "
            f"jzero.Workload(init, loss_fn, batch, tx, config)"
        )
    return workload


def split(reference: str) -> tuple[Path, str]:
    """A reference's file and factory; the file exists.

    Raises:
      JzeroError: no colon, or no such file.
    """
    file, colon, name = reference.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise JzeroError(
            f"{reference!r}: give a file and a factory in it, as in examples/lm/model.py:llama_13b"
        )
    path = Path(file)
    if not path.is_file():
        raise JzeroError(f"{reference}: no such file: {file}")
    if path.suffix != ".py":
        raise JzeroError(f"{reference}: {file} is not a Python file (.py)")
    return path, name


def one_line(error: BaseException) -> str:
    """An exception's kind and message in one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def import_file(path: Path, reference: str) -> ModuleType:
    path = path.resolve()
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # By its bare name, as modules beside it would import it, unless that name is taken.
    name = path.stem
    there = sys.modules.get(name)
    if there is not None:
        if getattr(there, "__file__", None) == str(path):
            return there
        name = f"{name} in {folder}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise JzeroError(f"{reference}: importing the file raised {one_line(error)}") from error
    return module


def _there_are(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if _is_factory(module, name, value)]
    return f"factories there: {', '.join(names)}" if names else "there are no factories in it"


def _is_factory(module: ModuleType, name: str, value: Any) -> bool:
    own = getattr(value, "__module__", None) == module.__name__
    if name.startswith("_") or not own or not callable(value) or inspect.isclass(value):
        return False
    signature = signature_of(value)
    if signature is None:
        return False
    returns = signature.return_annotation
    said = returns is inspect.Signature.empty or "Workload" in str(returns)
    return said and not _required(value)


def _required(factory: Callable[..., Any]) -> list[str]:
    signature = signature_of(factory, follow_wrapped=False)
    parameters = signature.parameters.values() if signature else ()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p.name
        for p in parameters
        if p.default is inspect.Parameter.empty and p.kind not in optional
    ]


def _article(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
