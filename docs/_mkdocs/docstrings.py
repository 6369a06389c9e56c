"""Griffe extension: docstrings are in reStructuredText, as help() and editors show it."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([\w.]+)`")
_LITERAL_BLOCK = re.compile(r"(?<=\S)::$", flags=re.MULTILINE)
_EXAMPLE = re.compile(r"^( *)Example:$", flags=re.MULTILINE)


class Docstrings(griffe.Extension):
    """Roles become links, where the site has the target, and sections get the names known here."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe with every module, class, function and attribute."""
        if obj.docstring is None:
            return

        def link(role: re.Match[str]) -> str:
            name = role[1]
            try:
                target = obj.resolve(name.partition(".")[0]) + name[len(name.partition(".")[0]) :]
            except griffe.NameResolutionError:
                target = name
            return f'<autoref identifier="{target}" optional>`{name}`</autoref>'

        text = _ROLE.sub(link, obj.docstring.value)
        text = _LITERAL_BLOCK.sub(":", text)
        obj.docstring.value = _EXAMPLE.sub(r"\1Examples:", text)
