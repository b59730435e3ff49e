"""For the API reference: docstrings and defaults as mkdocstrings shows them best.

Griffe renders `Examples:` sections; our docstrings have `Example:`. Doctests outside of them become code blocks,
because Markdown would take `>>>` for quotations. The default of a treatment's option is shown as a value, not as the
call that declares the dataclass field.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class ReadableReference(griffe.Extension):
    """Rewrites docstrings, and the default values of treatments."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of anything that has one."""
        if obj.docstring is not None and ">>>" in obj.docstring.value:
            obj.docstring.value = rewritten(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Replace `option(DEFAULT, ...)`, `number_option(DEFAULT, ...)` and `layers_option(...)` by the default."""
        if isinstance(call := attr.value, griffe.ExprCall):
            if str(call.function) in ("option", "number_option"):
                attr.value = call.arguments[0]
            elif str(call.function) == "layers_option":
                attr.value = "'all'"


def rewritten(text: str) -> str:
    r"""The text with an `Examples:` section, and its other doctests fenced.

    >>> rewritten("Adds.\n\n>>> 1 + 1\n2\n\nExample:\n    >>> 1 + 2\n    3").splitlines()
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```', '', 'Examples:', '    >>> 1 + 2', '    3']
    """
    lines: list[str] = []
    inside = False
    for line in re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE).splitlines():
        if not inside and line.startswith(">>>"):
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)
