"""Reading a configuration file: JSON with comments and trailing commas, no key given twice."""

import json
import os
import re
from typing import Any

from jzero.errors import ConfigError

# Strings come first so that a comment mark or a comma inside one is left alone.
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


class _Repeated(dict):
    """An object in which a key stands twice; it is found again, with its path, after parsing."""

    repeated = ""


def _blank(match: re.Match[str]) -> str:
    text = match.group()
    # Blanks keep every line and column where it was, for the parser's messages.
    return text if text.startswith('"') else re.sub(r"[^\n]", " ", text)


def _trailing(match: re.Match[str]) -> str:
    before = match.string[: match.start()].rstrip()[-1:]
    # A comma that nothing stands before is no trailing comma, and the parser says so.
    return match.group() if before in ("[", "{", ",", "") else _blank(match)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    seen: set[str] = set()
    marked = _Repeated(result)
    for name, _ in pairs:
        if name in seen:
            marked.repeated = name
            break
        seen.add(name)
    return marked


def _refuse_repeats(value: Any, path: str, where: str) -> None:
    if isinstance(value, _Repeated):
        full = f"{path}.{value.repeated}" if path else value.repeated
        raise ConfigError(f"{full}: given more than once in {where}; keep one of them")
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_repeats(inner, f"{path}.{name}" if path else name, where)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_repeats(inner, f"{path}[{index}]", where)


def parse(text: str, where: str = "the text") -> dict[str, Any]:
    """The object that a JSON text holds.

    Arguments: `text`, which may have `//`, `#` and `/* */` comments and trailing commas;
    `where` it came from, for messages.

    Raises: `ConfigError` naming the line and column of a syntax error, or the path of a
    repeated key.
    """
    if not text.strip():
        raise ConfigError(f"{where} is empty; a configuration is a JSON object, at least {{}}")
    bare = _TRAILING_COMMA.sub(_trailing, _COMMENT.sub(_blank, text))
    try:
        # NaN and Infinity become floats here and are refused, with their path, where they are read.
        value = json.loads(bare, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{where}, {at}: not valid JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply to be a configuration") from None
    except ValueError as error:  # such as a number of more digits than Python converts
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        kind = {list: "a list", str: "text", bool: "a boolean", type(None): "null"}
        found = kind.get(type(value), "a number")
        raise ConfigError(f"{where} holds {found}; a configuration is a JSON object {{...}}")
    _refuse_repeats(value, "", where)
    return value


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises: `ConfigError` for a file that is missing, a directory, unreadable, not UTF-8, empty,
    or not a JSON object.
    """
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8-sig") as file:
            text = file.read()
    except FileNotFoundError:
        if name.lstrip().startswith("{"):
            raise ConfigError("config: found JSON text; allowed: a dict or a path") from None
        raise ConfigError(f"{name}: no such configuration file") from None
    except IsADirectoryError:
        raise ConfigError(f"{name}: is a directory; give the JSON file itself") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name!r}: cannot be read: {reason}") from None
    return parse(text, name)
