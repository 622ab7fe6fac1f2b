"""What a key of the configuration is: a type, a default, and jzero's verdict on it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


class Verdict(Enum):
    """What jzero does with a key; the value is the word that the documentation uses."""

    MAP = "works"
    DIFF = "works, in another way"
    NOTICE = "no effect"
    NOT_YET = "not yet"
    REFUSE = "refused"


@dataclass(frozen=True)
class Key:
    """A verdict with its reason.

    `bites` says for which values a notice is given or the key is refused: by default every given
    value for a notice, every value but the default for a refusal. `switch` marks whole sections
    that are accepted only while they are switched off, whatever else they hold.
    """

    verdict: Verdict
    text: str
    bites: Callable[[Any], bool] | None = None
    switch: bool = False


class Section(BaseModel):
    """A JSON object of the configuration; a key that it does not list is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def key(
    default: Any,
    verdict: Verdict,
    text: str,
    *,
    bites: Callable[[Any], bool] | None = None,
    switch: bool = False,
) -> Any:
    """A field of a `Section` with its default (`...` where the key must be given) and verdict."""
    extra: Any = {"jzero": Key(verdict, text, bites, switch)}
    return Field(default=default, json_schema_extra=extra)


def works(default: Any, text: str) -> Any:
    """A key that does in jzero what it does in DeepSpeed."""
    return key(default, Verdict.MAP, text)


def notice(default: Any, text: str, *, bites: Callable[[Any], bool] | None = None) -> Any:
    """A key that is accepted and changes nothing."""
    return key(default, Verdict.NOTICE, text, bites=bites)


def not_yet(default: Any, text: str, *, bites: Callable[[Any], bool] | None = None) -> Any:
    """A key that will be honoured one day and is refused until then, unless it has its default."""
    return key(default, Verdict.NOT_YET, text, bites=bites)


def refused(default: Any, text: str, *, bites: Callable[[Any], bool] | None = None) -> Any:
    """A key that is refused unless it has its default."""
    return key(default, Verdict.REFUSE, text, bites=bites)


def off(text: str, verdict: Verdict = Verdict.REFUSE) -> Any:
    """A whole section that is accepted only while it is switched off."""
    return key(None, verdict, text, switch=True)


def section(factory: type[Section]) -> Any:
    """A nested section that has its defaults when it is absent."""
    return Field(default_factory=factory)


def of(field: FieldInfo) -> Key | None:
    """The verdict of a field; None for a field that is itself a section."""
    extra = field.json_schema_extra
    found = extra.get("jzero") if isinstance(extra, dict) else None
    return found if isinstance(found, Key) else None


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, None if it holds a plain value."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def walk(model: type[Section], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key below a section, sections included, with its full path."""
    for name, field in model.model_fields.items():
        full = f"{path}.{name}" if path else name
        yield full, field
        inner = section_of(field)
        if inner is not None:
            yield from walk(inner, full)
