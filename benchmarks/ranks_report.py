"""The records of `python -m moe_ops bench --ranks 2` (or 4) as Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import geometric_mean

from tables import Record, markdown, source

ONE, GATHER, DIRECT = "one GPU", "allgather_reducescatter", "symmetric"
BATCHED = "symmetric_batched"
LEGEND = """\
Each rank has as many tokens as the column says. Dispatch and combine: microseconds, from the least
to the most of all layers. Ratios are geometric means over the layers, and in brackets from the
least to the most."""
TIMES_LEGEND = f"""\
Microseconds for the layer with the exchange `{DIRECT}`, and in brackets with `{GATHER}`:"""


def report(records: list[Record]) -> str:
    """The Markdown of all ``records``: what travels, then whole layers by scheme."""
    return "\n\n".join([LEGEND, *(part for record in records for part in _parts(record))])


def _parts(record: Record) -> list[str]:
    rows, ranks = record["rows"], max(row["ranks"] for row in record["rows"])
    schemes = sorted({row["scheme"] for row in rows})
    layers = [f"`{s}`:\n\n{_layers([r for r in rows if r['scheme'] == s])}" for s in schemes]
    return [f"## {ranks} GPUs", source(record), _exchanges(rows, ranks), TIMES_LEGEND, *layers]


def _exchanges(rows: list[Record], ranks: int) -> str:
    """Dispatch and combine of the exchanges, and what they do to the layer's time."""
    tokens = sorted({row["M"] for row in rows})

    def spread(impl: str, part: str) -> list[str]:
        return [_range(r[part] for r in rows if r["impl"] == impl and r["M"] == m) for m in tokens]

    def ratio(measure: str, over: str, under: str) -> list[str]:
        values = {(r["impl"], r["M"], r["scheme"], r["shape"]): r[measure] for r in rows}
        layers = {(r["scheme"], r["shape"]) for r in rows}
        pairs = {m: [(over, m, *layer) for layer in layers] for m in tokens}
        return [
            _mean([values[key] / values[(under, *key[1:])] for key in keys if key in values])
            for keys in pairs.values()
        ]

    lines = [
        [f"dispatch, `{DIRECT}`", *spread(DIRECT, "send_us")],
        [f"dispatch, `{GATHER}`", *spread(GATHER, "send_us")],
        [f"combine, `{DIRECT}`", *spread(DIRECT, "return_us")],
        [f"combine, `{GATHER}`", *spread(GATHER, "return_us")],
        [f"time of a layer, `{DIRECT}` over `{GATHER}`", *ratio("time_us", DIRECT, GATHER)],
        [f"time of a layer, `{BATCHED}` over `{DIRECT}`", *ratio("time_us", BATCHED, DIRECT)],
        [f"tokens/s of {ranks} GPUs over one", *ratio("tokens_per_s", DIRECT, ONE)],
    ]
    return markdown(["tokens of a rank:", *map(str, tokens)], lines, labels=1)


def _layers(rows: list[Record]) -> str:
    tokens = sorted({row["M"] for row in rows})
    times = {(row["shape"], row["impl"], row["M"]): row["time_us"] for row in rows}

    def both(shape: str, m: int) -> str:
        if (shape, GATHER, m) not in times:  # the run ended before
            return ""
        return f"{times[shape, DIRECT, m]:.0f} ({times[shape, GATHER, m]:.0f})"

    shapes = sorted({row["shape"] for row in rows})
    lines = [[shape, *(both(shape, m) for m in tokens)] for shape in shapes]
    return markdown(["shape", *map(str, tokens)], lines, labels=1)


def _range(values: Iterable[float]) -> str:
    values = list(values)
    low, high = (f"{v:.1f}" if v < 10 else f"{v:.0f}" for v in (min(values), max(values)))
    return f"{low}-{high}"


def _mean(values: list[float]) -> str:
    if not values:  # not for so many tokens
        return ""
    return f"{geometric_mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"
