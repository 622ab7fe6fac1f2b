"""Every key that "works" is read by something, so that none is accepted and then forgotten."""

import inspect
import pathlib
import re

import pytest

import jzero
from jzero.config import Config, keys, load
from jzero.config.document import Document
from jzero.config.keys import Section, Verdict
from jzero.config.optimizer_params import OPTIMIZERS, SCHEDULERS

PACKAGE = pathlib.Path(inspect.getfile(jzero)).parent
# These build from a Config; the rest of jzero/config makes one.
BUILDERS = [PACKAGE / "config" / f"{name}.py" for name in ("optimizers", "schedules", "muon")]
OUTSIDE = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "config" not in path.parents]
BUILDING = "\n".join(path.read_text(encoding="utf-8") for path in BUILDERS)
SOURCE = BUILDING + "\n".join(path.read_text(encoding="utf-8") for path in OUTSIDE)

PROPERTIES = [name for name, value in vars(Config).items() if isinstance(value, property)]
# `load` itself holds it against fp16 and bf16; there is nothing left to read.
CHECKED_BY_LOAD = {"data_types.param_dtype"}
CONFIGS = (
    {"train_batch_size": 8, "optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}},
    {"train_batch_size": 8, "fp16": {"enabled": True}},
)


class Spy:
    """A section that notes which keys are read in it."""

    def __init__(self, section, seen, path=""):
        self.section, self.seen, self.path = section, seen, path

    def __getattr__(self, name):
        value = getattr(self.section, name)
        path = f"{self.path}.{name}" if self.path else name
        self.seen.add(path)
        return Spy(value, self.seen, path) if isinstance(value, Section) else value


def has_reader(name):
    return re.search(rf"\bconfig\.{name}\b", SOURCE) is not None


def keys_read():
    """The keys behind every property that has a reader."""
    seen = set()
    for source in CONFIGS:
        spied = Config(Spy(load(source)._document, seen))
        for name in filter(has_reader, PROPERTIES):
            found = getattr(spied, name)
            if isinstance(found, Spy):  # a section, whose keys the reader picks
                fields = type(found.section).model_fields
                seen |= {f"{name}.{key}" for key in fields if re.search(rf"\.{key}\b", SOURCE)}
        if has_reader("resolve_batch"):
            spied.resolve_batch(8, {"data": 8})
    return seen


def working(model, base=""):
    for path, field in keys.walk(model, base):
        key = keys.of(field)
        if key is not None and key.verdict in (Verdict.MAP, Verdict.DIFF):
            yield path


@pytest.mark.parametrize("name", PROPERTIES)
def test_every_property_has_a_reader(name):
    assert has_reader(name), f"nothing in jzero reads config.{name}"


def test_every_key_that_works_is_read():
    assert set(working(Document)) - keys_read() == CHECKED_BY_LOAD


@pytest.mark.parametrize(("kind", "model"), [*OPTIMIZERS.items(), *SCHEDULERS.items()])
def test_every_parameter_that_works_is_built_from(kind, model):
    unread = [key for key in working(model) if not re.search(rf"\bparams\.{key}\b", BUILDING)]
    assert unread == []
