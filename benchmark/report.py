# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""Tables and pictures of the benchmark, from the lines of its results."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any


Line = dict[str, Any]
Cell = tuple[str, int, int, str]  # mode, L, N, engine
COLORS = {"upstream": "#4d4d4d", "recompute": "#b0b0b0", "copy": "#e08214", "share": "#2166ac"}
HEADER = (
    "| N | engine | median s | min - max | / upstream, same N | / upstream, N = 1 | CPU s | CPU / upstream, N = 1 "
    "| prefill s | rows | prefill TFLOP | KV MiB | peak MiB | same tokens |\n|" + " --- |" * 14
)


def group(lines: list[Line]) -> dict[Cell, list[Line]]:
    """The runs of each cell of the grid."""
    cells: dict[Cell, list[Line]] = {}
    for line in lines:
        if "engine" in line:
            cells.setdefault((line["mode"], line["length"], line["num_sequences"], line["engine"]), []).append(line)
    return cells


def median(runs: list[Line] | None, field: str = "seconds") -> float | None:
    """The median of a field over the runs; None where there are none, or where it was not measured."""
    values = [run[field] for run in runs or [] if run[field] is not None]
    return statistics.median(values) if values else None


def ratio(value: float | None, base: float | None) -> str:
    return "" if value is None or base is None else f"{value / base:.2f}"


def mebibytes(value: float | None) -> str:
    return "" if value is None else f"{value / 2**20:.1f}"


def render_tables(lines: list[Line]) -> str:
    """A table per mode and length, in Markdown."""
    cells, head = group(lines), lines[0]
    machine = ", ".join(f"{name}: {value}" for name, value in head["machine"].items())
    subject = head["subject"]
    parts = [
        f"{subject['name'] or 'SmolLM2-135M-Instruct'}, {subject['dtype']}, {subject['device']}. {machine}. "
        f"Load of the machine: {min(run['load'] for runs in cells.values() for run in runs):.1f} to "
        f"{max(run['load'] for runs in cells.values() for run in runs):.1f}.\n"
    ]
    for mode, length in dict.fromkeys((mode, length) for mode, length, _, _ in cells):
        members = {cell: runs for cell, runs in cells.items() if cell[:2] == (mode, length)}
        new_tokens = next(iter(members.values()))[0]["new_tokens"]
        parts.append(f"## {mode}, L = {length}, {new_tokens} new tokens\n\n{HEADER}")
        parts += [_row(cell, runs, cells) for cell, runs in members.items()]
        parts.append("")
    return "\n".join(parts)


def _row(cell: Cell, runs: list[Line], cells: dict[Cell, list[Line]]) -> str:
    mode, length, num_sequences, engine = cell
    seconds, times = median(runs), [run["seconds"] for run in runs]
    cpu_seconds = median(runs, "cpu_seconds")
    reference, one = (cells.get((mode, length, count, "upstream")) for count in (num_sequences, 1))
    fields = [
        str(num_sequences),
        engine,
        f"{seconds:.2f}",
        f"{min(times):.2f} - {max(times):.2f}",
        ratio(seconds, median(reference)),
        ratio(seconds, median(one)),
        f"{cpu_seconds:.2f}",
        ratio(cpu_seconds, median(one, "cpu_seconds")),
        f"{median(runs, 'prefill_seconds'):.2f}",
        str(runs[0]["rows"]),
        f"{runs[0]['prefill_flops'] / 1e12:.3f}",
        mebibytes(median(runs, "cache_bytes")),
        mebibytes(median(runs, "peak_memory_bytes")),
        "" if reference is None else ("yes" if _same_tokens(runs, reference) else "no"),
    ]
    return f"| {' | '.join(fields)} |"


def _same_tokens(runs: list[Line], reference: list[Line]) -> bool:
    return all(run["tokens"] == reference[0]["tokens"] for run in [*runs, *reference])


def same_tokens(lines: list[Line]) -> bool:
    """Whether every call gave the tokens that upstream gave, wherever upstream ran."""
    cells = group(lines)
    return all(_same_tokens(runs, cells.get((*cell[:3], "upstream"), runs)) for cell, runs in cells.items())


def draw(lines: list[Line], folder: Path) -> Iterator[Path]:
    """Draws the pictures of each mode into `folder`, and yields their paths."""
    cells = group(lines)
    for mode in dict.fromkeys(cell[0] for cell in cells):
        own = {cell[1:]: runs for cell, runs in cells.items() if cell[0] == mode}
        for name, figure in _figures(mode, own):
            path = folder / f"{mode}_{name}.png"
            figure.savefig(path, dpi=150)
            yield path


def _figures(mode: str, cells: dict[tuple[int, int, str], list[Line]]) -> Iterator[tuple[str, Any]]:
    lengths = sorted({length for length, _, _ in cells})
    counts = sorted({count for _, count, _ in cells})
    kind = {"beam": "beams", "sample": "samples"}[mode]
    if len(lengths) > 1:
        # The count that the workload of the first report had, or the one next to it
        count = min((count for count in counts if count > 1), key=lambda count: abs(count - 6), default=counts[0])
        series = _series(cells, lambda length, n, engine: length if n == count else None)
        yield "time_by_length", _plot(series, "prompt length L (tokens)", "seconds", f"{count} {kind}: time", lengths)
    if len(counts) > 1:
        length = max(length for length, count, engine in cells if (count, engine) == (max(counts), "share"))
        length = min(length, 2048) if 2048 in lengths else length
        by_count = _series(cells, lambda at, n, engine: n if at == length else None)
        base = median(cells.get((length, 1, "upstream")))
        if base is not None:
            prices = {
                engine: [(n, *(value / base for value in values)) for n, *values in points]
                for engine, points in by_count.items()
            }
            title = f"The price of N {kind}, L = {length}"
            yield "price_by_count", _plot(prices, f"{kind} N", "time / upstream's time for one", title, counts)
        held = _series(cells, lambda at, n, engine: n if at == length else None, "cache_bytes", 2**20)
        yield "cache_by_count", _plot(held, f"{kind} N", "MiB", f"Keys and values held, L = {length}", counts)


def _series(cells, position, field: str = "seconds", unit: float = 1.0) -> dict[str, list[tuple[float, ...]]]:
    """For each engine its points (x, median, minimum, maximum), where `position` gives an x."""
    series: dict[str, list[tuple[float, ...]]] = {}
    for (length, count, engine), runs in cells.items():
        if (x := position(length, count, engine)) is not None:
            values = [run[field] / unit for run in runs]
            series.setdefault(engine, []).append((x, statistics.median(values), min(values), max(values)))
    return {engine: sorted(points) for engine, points in series.items()}


def _plot(series: dict[str, list[tuple[float, ...]]], x_label: str, y_label: str, title: str, ticks: list[int]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for engine in (engine for engine in COLORS if engine in series):
        points = series[engine]
        x, middle, low, high = zip(*points)
        spread = [[m - value for m, value in zip(middle, low)], [value - m for m, value in zip(middle, high)]]
        axes.errorbar(x, middle, yerr=spread, label=engine, color=COLORS[engine], marker="o", markersize=4, capsize=2)
    axes.set(title=title, xlabel=x_label, ylabel=y_label, xticks=ticks, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(title="median, min to max")
    return figure
