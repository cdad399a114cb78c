"""Read YAML that others may have written: what would hang, overflow or be lost silently is refused."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.constructor import ConstructorError

_DEEPEST = 100  # lists in lists
_LARGEST = 2**63  # what JSON readers, numpy and torch can hold


class HostileYaml(yaml.YAMLError):
    """YAML that is valid, but would hang or crash its reader."""


def read_yaml(text: str) -> Any:
    """The content, as `yaml.safe_load` returns it; every error is a yaml.YAMLError.

    Refused beyond that: aliases that multiply the content ("billion laughs") or contain themselves, keys that
    are given twice, whole numbers over 64 bits, and nesting deeper than 100 levels.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise
    except RecursionError:  # through aliases
        raise HostileYaml("it is nested too deeply") from None
    except Exception as error:  # PyYAML lets those of int(), datetime and others through
        raise yaml.YAMLError(f"a value cannot be read: {error!r}") from error


def check_structure(text: str) -> None:
    """HostileYaml for aliases and nesting that `read_yaml` refuses; invalid YAML passes."""
    try:
        yaml.compose(text, Loader=_Loader)
    except RecursionError:
        raise HostileYaml("it is nested too deeply") from None
    except HostileYaml:
        raise
    except yaml.YAMLError:
        pass


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader in Python: the one in C has no limit of nesting before the stack ends."""

    def fetch_flow_collection_start(self, TokenClass: type) -> None:
        if self.flow_level >= _DEEPEST:  # each level would make every further token slower to read
            raise HostileYaml("it is nested too deeply")
        super().fetch_flow_collection_start(TokenClass)

    def add_indent(self, column: int) -> bool:
        if len(self.indents) >= _DEEPEST:
            raise HostileYaml("it is nested too deeply")
        return super().add_indent(column)

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            sizes: dict[int, int] = {}
            if _expanded(node, sizes) > 10 * len(sizes) + 10_000:
                raise HostileYaml("its aliases multiply its content")
        return node


def _expanded(node: yaml.Node, sizes: dict[int, int]) -> int:
    """The number of nodes if every alias were written out; `sizes` has each node's by its id."""
    if id(node) in sizes:
        if sizes[id(node)] == 0:
            raise HostileYaml("an alias contains itself")
        return sizes[id(node)]
    sizes[id(node)] = 0
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    size = 1
    for part in parts:
        size += _expanded(part, sizes)
    sizes[id(node)] = size
    return size


def _check_keys(node: yaml.MappingNode) -> None:
    given: set[tuple[str, str]] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
            continue
        if (key.tag, key.value) in given:
            raise ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
        given.add((key.tag, key.value))


def _whole_number(loader: _Loader, node: yaml.ScalarNode) -> int:
    number = loader.construct_yaml_int(node)
    if abs(number) >= _LARGEST:
        raise ConstructorError(None, None, "a whole number is too large", node.start_mark)
    return number


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)
