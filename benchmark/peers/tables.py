# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Tables of the benchmark of other engines, from the lines of its results."""

from ..report import Cell, Line, group, median, ratio


REFERENCE, OURS = "upstream", "share"
HEADER = (
    "| engine | version | precision | N | median s | min - max | CPU s | / own N = 1 | CPU / own N = 1 "
    "| / upstream, N = 1 | best beam |\n|" + " --- |" * 11
)
EXPLANATION = (
    'Ratios are of median wall times. "Best beam": whether its tokens are those of `share` with as many beams, which '
    "are upstream's; other rounding may choose others."
)


def render_tables(lines: list[Line]) -> str:
    """A table per mode and length, in Markdown, and what was left out."""
    machine = ", ".join(f"{name}: {value}" for name, value in lines[0]["machine"].items())
    cells = group(lines)
    loads = [run["load"] for runs in cells.values() for run in runs]
    load = f" Load of the machine: {min(loads):.1f} to {max(loads):.1f}." if loads else ""
    parts = [f"{lines[0]['model']}. {machine}.{load}\n"]
    for mode, length in dict.fromkeys(cell[:2] for cell in cells):
        members = [cell for cell in cells if cell[:2] == (mode, length)]
        new_tokens = cells[members[0]][0]["new_tokens"]
        parts.append(f"## {mode}, L = {length}, {new_tokens} new tokens\n\n{HEADER}")
        engines = list(dict.fromkeys(cell[3] for cell in members))
        members.sort(key=lambda cell: (engines.index(cell[3]), cell[2]))
        parts += [_row(cell, cells) for cell in members]
        parts.append("")
    parts.append(EXPLANATION)
    parts += [f"Left out: {line['left_out']}: {line['reason']}" for line in lines if "left_out" in line]
    return "\n".join(parts) + "\n"


def _row(cell: Cell, cells: dict[Cell, list[Line]]) -> str:
    mode, length, num_sequences, engine = cell
    runs = cells[cell]
    own = cells.get((mode, length, 1, engine))
    seconds, times = median(runs), [run["seconds"] for run in runs]
    cpu_seconds = median(runs, "cpu_seconds")
    fields = [
        engine,
        runs[0]["version"],
        runs[0]["precision"],
        str(num_sequences),
        f"{seconds:.2f}",
        f"{min(times):.2f} - {max(times):.2f}",
        f"{cpu_seconds:.2f}",
        ratio(seconds, median(own)),
        ratio(cpu_seconds, median(own, "cpu_seconds")),
        ratio(seconds, median(cells.get((mode, length, 1, REFERENCE)))),
        best_beam(runs, cells.get((mode, length, num_sequences, OURS))) if mode == "beam" else "",
    ]
    return f"| {' | '.join(fields)} |"


def best_beam(runs: list[Line], reference: list[Line] | None) -> str:
    """Says whether the first sequence of all runs is that of the reference, or how many tokens agree at least."""
    if reference is None:
        return ""
    expected = reference[0]["tokens"][0]
    agreeing = min(common_prefix(run["tokens"][0], expected) for run in runs)
    return "same" if agreeing == len(expected) else f"first {agreeing} of {len(expected)}"


def common_prefix(first: list[int], second: list[int]) -> int:
    """How many tokens at the beginning are equal."""
    return next((at for at, (one, other) in enumerate(zip(first, second)) if one != other), len(second))
