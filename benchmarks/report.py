"""The records of layers and of overheads as Markdown tables, which `make docs` puts on their pages.

python benchmarks/report.py                     # print them
python benchmarks/report.py --write README.md   # put the fullest record's headline there
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean

import models_report
import peers_report
from tables import OURS, RESULTS, TOKENS, Record, cell, is_ours, markdown, source

BEGIN, END = "<!-- headline:begin -->", "<!-- headline:end -->"
INVARIANT = "moe_ops-invariant"
ESTIMATE = "estimate"
"""What the GPU's measured rates allow: `floor_us` of a record. A GPU may be a little faster."""
LEGEND = f"""\
Microseconds for the whole layer, uniform routing: median over replays of a CUDA graph, each with a
cold L2 cache. In brackets the time of {OURS} over that line's: below 1, {OURS} is faster. Bold is
the fastest. The estimate is the time that bandwidth and arithmetic need at measured rates; how all
of it is measured: `benchmarks/README.md`."""
INVARIANT_LEGEND = f"""\
Cost of batch invariance: the time of `batch_invariant=True` in microseconds, and in brackets how
many times that of {OURS} without it."""

HEADLINE = {
    "times as fast as transformers' `grouped_mm`": (("bf16", "hf-grouped_mm"), ("bf16", OURS)),
    "time over the estimate of what the GPU allows": (("bf16", OURS), ("bf16", ESTIMATE)),
    "`fp8_block128`: times as fast as bf16": (("bf16", OURS), ("fp8_block128", OURS)),
    "`mxfp4_w4a16`: times as fast as bf16": (("bf16", OURS), ("mxfp4_w4a16", OURS)),
}
"""Label of a line -> the scheme and implementation of its numerator and of its denominator."""

OVERHEADS_LEGEND = """\
What a bf16 layer costs beside GPU time. Host time: until a call returns, its kernels not waited
for; median, and in brackets the 10th and 90th percentile. Peak memory: what a call allocates at
most, its output included; `workspace_nbytes` says that beforehand. Import (after torch's own),
first call, and after it the first call under torch.compile for that number of tokens: in a process
that starts with empty caches of Triton and Inductor."""
OVERHEADS = {
    "host_us": "host time of a call (us)",
    "peak_bytes": "peak memory (MiB)",
    "workspace_nbytes": "`workspace_nbytes` (MiB)",
    "import_s": "import (s)",
    "first_call_s": "first call (s)",
    "compile_s": "torch.compile (s)",
}
"""Name of a measure -> its label in the table."""

MODELS_LEGEND = """\
Whole models in transformers, with random weights: tokens per second of 1, 8 and 64 sequences that
decode, and of a prompt of 4096 tokens; one step replayed from a CUDA graph."""


def read_records(results: Path, name: str = "layer.json") -> list[Record]:
    """The records called ``name`` of every GPU under ``results``, the fullest first."""
    records = [json.loads(path.read_text()) for path in sorted(results.glob(f"*/{name}"))]
    return sorted(records, key=lambda record: -len(record["rows"]))


def report(records: list[Record]) -> str:
    """The Markdown of all ``records``: a heading and table per GPU and scheme, uniform routing."""
    if not records:
        return "No results yet."
    return "\n\n".join([LEGEND, *(part for record in records for part in _parts(record))])


def _parts(record: Record) -> list[str]:
    by_scheme = defaultdict(list)
    shown = [r for r in record["rows"] if r["routing"] == "uniform" and r["M"] in TOKENS]
    for row in shown:
        if row["impl"] != INVARIANT:
            by_scheme[row["scheme"]].append(row)
    gpu = record["gpu"]
    tables = [
        part
        for scheme, rows in sorted(by_scheme.items())
        for part in (f"#### {gpu}: {scheme}", layer_table(rows))
    ]
    cost = _invariance(shown)
    last = [f"#### {gpu}: batch invariance", INVARIANT_LEGEND, cost] if cost else []
    return [f"### {gpu}", source(record), *tables, *last]


def _invariance(rows: list[Record]) -> str | None:
    """The cost of batch invariance, a line per scheme and shape; None without such rows."""
    times = {(row["scheme"], row["shape"], row["impl"], row["M"]): row["time_us"] for row in rows}
    invariant = [key for key in times if key[2] == INVARIANT]
    if not invariant:
        return None
    tokens = [m for m in TOKENS if any(key[3] == m for key in invariant)]

    def cost(scheme: str, shape: str, m: int) -> str:
        time, default = (times.get((scheme, shape, impl, m)) for impl in (INVARIANT, OURS))
        return cell(time, default, _us, lambda default, time: time / default)

    lines = [
        [f"`{scheme}`", shape, *(cost(scheme, shape, m) for m in tokens)]
        for scheme, shape in sorted({key[:2] for key in invariant})
    ]
    return markdown(["scheme", "shape", *map(str, tokens)], lines, labels=2)


def headline(records: list[Record]) -> str:
    """The Markdown of the mean ratios: one table per GPU, uniform routing.

    A ratio is the geometric mean over the shapes that both lines have; lines without any are left
    out.
    """
    return "\n\n".join(part for record in records for part in _headline(record))


def _headline(record: Record) -> list[str]:
    rows = [r for r in record["rows"] if r["routing"] == "uniform" and r["M"] in TOKENS]
    beside_peers = peers_report.summary(record)
    rows = [row for row in rows if row["shape"] not in peers_report.UNTUNED_SHAPES]
    times = {(r["scheme"], r["impl"], r["M"], r["shape"]): r["time_us"] for r in rows}
    ours = [row for row in rows if row["impl"] == OURS]
    times |= {(r["scheme"], ESTIMATE, r["M"], r["shape"]): r["floor_us"] for r in ours}
    shapes = dict.fromkeys(row["shape"] for row in rows)

    def ratios(over: tuple[str, str], under: tuple[str, str], m: int) -> dict[str, float]:
        pairs = {s: (times.get((*over, m, s)), times.get((*under, m, s))) for s in shapes}
        return {s: a / b for s, (a, b) in pairs.items() if a and b}

    lines = []
    for label, pair in HEADLINE.items():
        by_tokens = [ratios(*pair, m) for m in TOKENS]
        if any(by_tokens):
            where = _where({s for column in by_tokens for s in column}, len(shapes))
            means = [f"{geometric_mean(list(c.values())):.2f}" if c else "-" for c in by_tokens]
            lines.append([label + where, *means])
    peers = _peers_of(rows, len(shapes))
    told = (
        f"Geometric means over {len(shapes)} models' layers ({', '.join(shapes)}), in bf16 unless "
        f"it says otherwise. Peers: {peers or 'none'}. {source(record)}"
    )
    return [markdown(["tokens:", *map(str, TOKENS)], lines, labels=1), *beside_peers, told]


def models_headline(records: list[Record]) -> str:
    """The Markdown of captured steps of whole models, of those schemes that a peer was timed in."""
    return "\n\n".join(part for record in records for part in _models_headline(record))


def _models_headline(record: Record) -> list[str]:
    rows = [row for row in models_report.timed(record) if row["mode"] == "captured"]
    cases = models_report.cases_of(rows)
    speed = {
        (r["model"], r["scheme"], r["impl"], r["phase"], r["M"]): r["tokens_per_s"] for r in rows
    }
    impls = sorted({key[:3] for key in speed}, key=lambda key: (key[:2], key[2] != OURS, key[2]))
    with_peer = {key[:2] for key in impls if not is_ours(key[2])}
    lines = []
    for model, scheme, impl in impls:
        if (model, scheme) in with_peer:
            speeds = (speed.get((model, scheme, impl, *case)) for case in cases)
            cells = (cell(measured, None, "{:,.0f}".format) for measured in speeds)
            lines.append([model, f"`{scheme}`", impl, *cells])
    head = ["model", "weights", "experts", *(f"{phase} {m}" for phase, m in cases)]
    told = f"{MODELS_LEGEND} {source(record)}"
    return [markdown(head, lines, labels=3), told.replace("\n", " ")] if lines else []


def readme(results: Path) -> str:
    """What README shows: layers of the fullest record, and whole models."""
    layers, models = read_records(results), read_records(results, "models.json")
    return f"{headline(layers[:1])}\n\n{models_headline(models[:1])}"  # the docs have every GPU


def _where(shapes: set[str], of: int) -> str:
    """In brackets the only shapes of several that something was timed on; empty: on all."""
    return "" if len(shapes) == of else f" ({', '.join(sorted(shapes))})"


def _peers_of(rows: list[Record], of: int) -> str:
    """The peers, each with the shapes that it was timed on."""
    shapes = defaultdict(set)
    for row in rows:
        if not is_ours(row["impl"]):
            shapes[row["impl"]].add(row["shape"])
    groups = defaultdict(list)
    for peer in sorted(shapes):
        groups[_where(shapes[peer], of)].append(peer)
    return "; ".join(f"{', '.join(peers)}{where}" for where, peers in sorted(groups.items()))


def _us(time: float) -> str:
    return f"{time:.1f}" if time < 100 else f"{time:.0f}"


def layer_table(rows: list[Record]) -> str:
    """The Markdown table of the layers of one scheme: see `_shape_lines`."""
    tokens = [m for m in TOKENS if any(row["M"] == m for row in rows)]
    lines = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        lines += _shape_lines(shape, [row for row in rows if row["shape"] == shape], tokens)
    return markdown(["shape", "tokens:", *map(str, tokens)], lines, labels=2, once=1)


def _shape_lines(shape: str, rows: list[Record], tokens: list[int]) -> list[list[str]]:
    """The lines of one shape: moe_ops, the estimate, and each peer."""
    times: dict[str, dict[int, float]] = {OURS: {}, ESTIMATE: {}}
    for row in rows:
        times.setdefault(row["impl"], {})[row["M"]] = row["time_us"]
        if row["floor_us"] is not None:
            times[ESTIMATE][row["M"]] = row["floor_us"]
    peers = sorted(times.keys() - {OURS, ESTIMATE})
    rivals = [impl for impl in peers if not is_ours(impl)]
    contest = (OURS, *rivals) if rivals else ()
    best = {m: min((times[i][m] for i in contest if m in times[i]), default=None) for m in tokens}

    def shown(impl: str, m: int) -> str:
        time, ours = times[impl].get(m), None if impl == OURS else times[OURS].get(m)
        bold = "**" if impl in contest and time == best[m] else ""
        return cell(time, ours, lambda time: f"{bold}{_us(time)}{bold}")

    impls = [impl for impl in (OURS, ESTIMATE, *peers) if times[impl]]
    return [[shape, impl, *(shown(impl, m) for m in tokens)] for impl in impls]


def overheads_report(records: list[Record]) -> str:
    """The Markdown of all ``records`` of overheads: one table per GPU, uniform routing."""
    parts = [part for record in records for part in (source(record), _overheads(record["rows"]))]
    return "\n\n".join([OVERHEADS_LEGEND, *parts])


def _overheads(rows: list[Record]) -> str:
    """A line per shape, measure and number of tokens, with a column per implementation."""
    impls = sorted({row["impl"] for row in rows}, key=lambda impl: (not is_ours(impl), impl))
    cells: dict[tuple[str, str, int], dict[str, str]] = defaultdict(dict)
    for row in rows:
        shape, measure, tokens, impl = (row[name] for name in ("shape", "measure", "M", "impl"))
        # One token takes hardly any memory; in bf16 host time does not depend on the tokens.
        dense = row["scheme"] == "bf16"
        shown = {"host_us": tokens == 1 or not dense, "peak_bytes": tokens > 1}.get(measure, True)
        shape = shape if dense else f"{shape}, {row['scheme']}"
        if shown and row["routing"] == "uniform":
            cells[shape, measure, tokens][impl] = _overhead(row)
            if told := row["config"].get("workspace_nbytes"):
                cells[shape, "workspace_nbytes", tokens][impl] = _mib(told)
    order = list(OVERHEADS)
    lines = []
    for shape, measure, tokens in sorted(cells, key=lambda c: (c[0], order.index(c[1]), c[2])):
        by_impl = cells[shape, measure, tokens]
        each = [by_impl.get(impl, "-") for impl in impls]
        lines.append([shape, OVERHEADS[measure], str(tokens), *each])
    return markdown(["shape", "", "tokens", *impls], lines, labels=2, once=1)


def _overhead(row: Record) -> str:
    if row["measure"] == "host_us":
        return f"{_us(row['value'])} ({_us(row['p10'])}-{_us(row['p90'])})"
    return _mib(row["value"]) if row["measure"] == "peak_bytes" else f"{row['value']:.2f}"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.2f}"


def between_markers(text: str) -> str | None:
    """The text between the markers of ``text``; None without markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        return None
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def write_report(path: Path, content: str) -> None:
    """Put ``content`` between the markers of the file.

    Raises:
        SystemExit: the file lacks the markers, or has them more than once.
    """
    text = path.read_text()
    if between_markers(text) is None:
        raise SystemExit(f"{path} must have one line {BEGIN} and, after it, one line {END}")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n{content}\n{END}{after}")


def main() -> None:
    """Print the report, or write the headline with ``--write``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a file that has the markers")
    args = parser.parse_args()
    records = read_records(args.results)
    if args.write:
        write_report(args.write, readme(args.results))
        print(f"{args.write}: {source(records[0])}")
    else:
        overheads = read_records(args.results, "overheads.json")
        print(headline(records), report(records), overheads_report(overheads), sep="\n\n")


if __name__ == "__main__":
    main()
