"""The report of a plan as text."""

from collections.abc import Sequence

from titan_muon.cli.report import GroupReport, ParameterReport, Report, SetReport
from titan_muon.integration.text_table import table

__all__ = ["as_text"]

_LEFT = ("algorithm", "layout", "options", "parameter", "sizes")


def as_text(report: Report) -> str:
    """Return the report as a text of several tables."""
    parts = [_heading(report), "", _groups(report.groups), "", _layouts(report.groups)]
    if report.sets:
        parts += ["", _sets(report.sets)]
    if report.parameters:
        parts += ["", _parameters(report.parameters)]
    parts += ["", _times(report), f"optimizer state: {_bytes(report.state_bytes)} on a rank"]
    parts += [f"note: {text}" for text in report.notes]
    parts += [f"warning: {text}" for text in report.warnings]
    return "\n".join(parts)


def _heading(report: Report) -> str:
    run = report.run
    degrees = [
        f"{name.removesuffix('_degree')} {size}"
        for name, size in run["parallelism"].items()
        if size not in (1, -1)
    ]
    ranks = "1 rank" if report.world_size == 1 else f"{report.world_size} ranks"
    layout = f" ({', '.join(degrees)})" if degrees else ""
    return f"{run['model']} {run['flavor']} with {run['optimizer']} on {ranks}{layout}"


def _groups(groups: Sequence[GroupReport]) -> str:
    headings = (
        "algorithm",
        "tensors",
        "parameters",
        "matrices",
        "owners",
        "per rank",
        "sent/rank",
        "FLOP",
        "most/rank",
        "state/rank",
        "options",
    )
    rows = [
        (
            group.algorithm,
            group.tensors,
            f"{group.parameters:,}",
            *(
                (
                    group.matrices,
                    group.owners,
                    _range(group.fewest, group.most),
                    _bytes(group.bytes_sent),
                    _number(group.flops),
                    _number(group.most_flops),
                )
                if group.matrices
                else ("-",) * 6
            ),
            _bytes(group.state_bytes),
            ", ".join(key for key in ("split", "flatten") if group.options.get(key)) or "-",
        )
        for group in groups
    ]
    return table(headings, rows, left=_LEFT)


def _layouts(groups: Sequence[GroupReport]) -> str:
    rows = [
        (group.algorithm, f"{layout.tensors}", f"{layout.parameters:,}", layout.layout)
        for group in groups
        for layout in group.layouts
    ]
    return table(("algorithm", "tensors", "parameters", "layout"), rows, left=_LEFT)


def _sets(sets: Sequence[SetReport]) -> str:
    headings = (
        "ranks",
        "matrices",
        "stages",
        "all-to-alls",
        "balance",
        "at best",
        "sent/rank",
        "at most",
        "work memory",
        "packets",
    )
    rows = [
        (
            _range(found.first_rank, found.first_rank + found.ranks - 1),
            found.matrices,
            found.stages,
            found.collectives,
            f"{found.balance:.3f}",
            f"{found.best_balance:.3f}",
            _bytes(found.bytes_sent),
            _bytes(found.most_bytes_sent),
            _bytes(found.work_bytes),
            _bytes(found.buffer_bytes),
        )
        for found in sets
    ]
    return table(headings, rows)


def _parameters(parameters: Sequence[ParameterReport]) -> str:
    headings = (
        "parameter",
        "algorithm",
        "matrices",
        "sizes",
        "owners",
        "stages",
        "sent/rank",
        "FLOP",
        "state/rank",
        "layout",
    )
    rows = [
        (
            item.name,
            item.algorithm,
            item.matrices or "-",
            ", ".join(f"{count} x ({m}, {n})" for count, m, n in item.sizes)
            or f"{tuple(item.shape)}",
            item.owners or "-",
            _range(item.stages[0], item.stages[-1]) if item.stages else "-",
            _bytes(item.bytes_sent) if item.matrices else "-",
            _number(item.flops) if item.matrices else "-",
            _bytes(item.state_bytes),
            item.layout,
        )
        for item in parameters
    ]
    return table(headings, rows, left=_LEFT)


def _times(report: Report) -> str:
    times, rates = report.milliseconds, report.rates
    return (
        f"modelled time of the optimizer: {times.total:.3g} ms a step\n"
        f"  orthogonalization {times.orthogonalize:.3g}, exchange {times.exchange:.3g} (hides "
        f"under that but for its first and last stage), elementwise {times.elementwise:.3g}\n"
        f"  assuming {rates.tflops:g} TFLOP/s (--tflops), {rates.link_gbs:g} GB/s sent by a rank "
        f"(--link-gbs), {rates.memory_gbs:g} GB/s of memory (--memory-gbs)"
    )


def _range(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low}-{high}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _number(value: float) -> str:
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 1000:
            return f"{value:.3g} {unit}".strip()
        value /= 1000
    return f"{value:.4g} E"
