"""Finds the wiring between the kernel and its parts: names that one imports from the other. There is none.

    kernel/http/engine.py moving 8     the kernel names a part
    rounds -> moving 10                a part names another part, though its `needs` do not
    page -> simulator 6                a part names a tool

Files that need another part beside the needs of their own stand in a folder `with_OTHER`, and are reached by `also` of
their part. They may name the other part and its needs. The rest of their part may not name them.

Files that only a tool loads have the name of the tool's face (`TOOLS`), and may name the tool.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_rollout.kernel.parts import parts

ROOT = Path(__file__).parents[1]
TOOLS = {
    **dict.fromkeys(("integrations", "profiling", "training")),
    "demo": "demo",
    "doctor": "doctor",
    "simulator": "simulated",
}
"""Folder of each tool -> its face, which names files or folders of parts."""


def wiring(package: Path) -> dict[str, int]:
    """Counts by what is wired, sorted."""
    found: Counter[str] = Counter()
    needs = {part.name: part.needs for part in parts()}
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package)
        ring, owner = where.parts[0], where.parts[1] if len(where.parts) > 2 else ""
        if ring not in ("adapter", "kernel", "parts"):
            continue
        rooms = where.with_suffix("").parts if ring == "parts" else ()
        for module in imports(path.read_text()):
            _, *rest = module.split(".")
            if rest[:1] == ["parts"] and len(rest) > 1 and ring != "parts":
                found[f"{where} {rest[1]}"] += 1
            elif rest[:1] == ["parts"] and len(rest) > 1:
                allowed = {owner, *others(where.parts)}
                allowed.update(need for part in list(allowed) for need in needs.get(part, ()))
                found.update(f"{owner} -> {other}" for other in {rest[1], *others(rest)} - allowed)
            elif rest and rest[0] in TOOLS and TOOLS[rest[0]] not in rooms:
                found[f"{owner if ring == 'parts' else where} -> {rest[0]}"] += 1
    return dict(sorted(found.items()))


def others(names: Sequence[str]) -> set[str]:
    """The parts that a module needs because of its folder."""
    return {name.removeprefix("with_") for name in names[2:3] if name.startswith("with_")}


def imports(source: str) -> Iterator[str]:
    """Modules of ours from which a file imports, once for each name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm_rollout"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


if __name__ == "__main__":
    for what, count in (found := wiring(ROOT / "vllm_rollout")).items():
        print(what, count)
    sys.exit(bool(found))
