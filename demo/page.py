"""The report as one HTML page without any other file."""

from __future__ import annotations

from html import escape

from rowmax.cli.checks import Checks, Result

from . import charts
from .format import count, duration, printable, size
from .long_sequence import LongSequence
from .report import DemoReport
from .training import SMOOTHING, Training

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fbfaf8; --card: #ffffff; --ink: #1d1c1a; --soft: #6a6660; --rule: #e4e0d9;
  --good: #1f7a4a; --some: #8a5a00; --bad: #b3261e; --s0: #c2410c; --s1: #1d4ed8; --s2: #8a857c;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #161513; --card: #1f1d1b; --ink: #ece9e4; --soft: #a39d93; --rule: #37332e;
    --good: #5cc98d; --some: #f0b429; --bad: #ff8a80; --s0: #fb923c; --s1: #7aa2ff; --s2: #7d776d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.3rem; margin: 3rem 0 .5rem; letter-spacing: -.005em; }
p { margin: .5rem 0; max-width: 46rem; }
.soft { color: var(--soft); }
.good { color: var(--good); } .some { color: var(--some); }
.bad { color: var(--bad); font-weight: 600; }
.tiles { display: grid; gap: .9rem; margin: 1.75rem 0 0;
  grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: .6rem;
  padding: .9rem 1.1rem 1rem; }
.tile b { display: block; font-size: 1.6rem; line-height: 1.25; font-weight: 650;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .9rem; line-height: 1.4; display: block; }
figure { margin: 1rem 0; background: var(--card); border: 1px solid var(--rule);
  border-radius: .6rem; padding: 1rem 1rem .8rem; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .5rem; }
svg { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif; }
svg .grid { stroke: var(--rule); } svg .limit { stroke: var(--bad); stroke-dasharray: 5 5; }
svg .tick { fill: var(--soft); } svg .label { fill: var(--ink); }
svg .value { fill: var(--ink); font-weight: 600; }
svg .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .curve.s0 { stroke: var(--s0); stroke-width: 5; stroke-opacity: .55; }
svg .curve.s1 { stroke: var(--s1); stroke-width: 1.6; }
.single svg .curve.s0 { stroke-width: 2; stroke-opacity: 1; }
svg .bar.s0 { fill: var(--s2); } svg .bar.s1 { fill: var(--s0); } svg .bar.s2 { fill: var(--s0);
  fill-opacity: .45; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: .95rem; margin: 1rem 0; }
th, td { padding: .4rem .75rem .4rem 0; border-bottom: 1px solid var(--rule); text-align: left;
  white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; } tr > :not(:first-child) { text-align: right; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: .6rem;
  padding: 1rem 1.1rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .88rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
footer { margin-top: 3rem; color: var(--soft); font-size: .9rem; }
"""


def render(report: DemoReport) -> str:
    """Return the whole page."""
    kind = {0: "good", 1: "bad"}.get(report.exit_code, "some")
    verdict = f'<p class="{kind}">{escape(report.verdict)}</p>'
    sections = (
        _tiles(report),
        _training(report.training),
        _long_sequence(report.long_sequence),
        _checks(report.checks),
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>rowmax on this machine</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>rowmax on this machine</h1>
<p class="soft">{escape(str(report.machine))}</p>
{verdict}
{_time(report)}
{"".join(sections)}
<footer><p>Written by <code>make demo</code>. Every figure on this page was measured on the
machine and the day named at its head.</p></footer>
</main>
</body>
</html>
"""


def _time(report: DemoReport) -> str:
    """Return a list of the things left out, and how busy the machine was."""
    notes = "".join(f"<li>{escape(text)}</li>" for text in report.left_out)
    left_out = f'<ul class="some">{notes}</ul>' if notes else "<p>Nothing was left out.</p>"
    loads = (report.machine.load, report.load)
    load = ""
    if None not in loads:
        load = (
            f" The load average was {loads[0]:.1f} at the start and {loads[1]:.1f} at the end, on "
            f"{report.machine.cores} cores; more than the cores can run makes all times longer."
        )
    took = f"{duration(report.seconds)} of the {duration(report.allowed)} allowed"
    return f'{left_out}<p class="soft">It took {took}.{load}</p>'


def _tiles(report: DemoReport) -> str:
    right, checked = report.checks.count
    training, long = report.training, report.long_sequence
    tiles = [(f"{right} of {checked}", "checks against the float64 definition are right")]
    if training is not None:
        speeds = training.tokens_per_second
        ratio = speeds["rowmax"] / speeds["SDPA"]
        apart = f"{100 * training.differences.curves:.2f}%"
        tiles.append((apart, "is the most by which the two loss curves differ"))
        tiles.append((f"{ratio:.2f} times", "the tokens a second of the same model with SDPA"))
    if long is not None:
        matrix = size(long.shape.matrix_bytes)
        tiles.append((size(long.memory), f"at the peak where the score matrix would take {matrix}"))
    cells = (f'<div class="tile"><b>{b}</b><span>{escape(text)}</span></div>' for b, text in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _training(training: Training | None) -> str:
    if training is None:
        return '<h2>A small GPT, trained twice</h2><p class="some">Not run (time).</p>'
    plan, curves = training.plan, training.curves
    smooth = {name: curve.smooth for name, curve in curves.items()}
    ours, theirs = smooth.values()
    apart = [100 * abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
    last = len(next(iter(curves.values())).losses)
    first = last - len(ours) + 1
    speeds = training.tokens_per_second
    rows: list[tuple[str, ...]] = [
        ("Attention", "First loss", "Last loss", "Held-out loss", "Tokens a second")
    ]
    for name, curve in curves.items():
        losses = (curve.losses[0], curve.smooth[-1], curve.held_out)
        rows.append((name, *(f"{x:.3f}" for x in losses), f"{speeds[name]:,.0f}"))
    text, kind = ("agree", "good") if training.ok else ("do not agree", "bad")
    precision = "bfloat16" if plan.bfloat16 else "float32"
    agreement = [("Largest relative difference", "Found", "Allowed")]
    agreement += [(k, f"{a:.1e}", f"{b:.0e}") for k, (a, b) in training.agreement.items()]
    allowed = 100 * plan.allowed.curves
    limit = (allowed, f"allowed: {allowed:g}%")
    return f"""
<h2>A small GPT, trained twice</h2>
<p>{count(training.parameters)} parameters, {plan.size.layers} layers, bytes for tokens,
{plan.size.context} to a row and {plan.rows} rows to a step, in {precision}; the text is
{training.files} files, {size(training.corpus_bytes)}, of Python's standard library. The same
model from the same start saw the same batches twice: once with rowmax, once with PyTorch's
standard attention (SDPA). Their steps took turns: {training.steps} each, of {training.asked}
where there is time.</p>
<p class="{kind}">The two {text}.</p>
<figure>{charts.lines(smooth, "step", "loss, nats a byte", first)}
<figcaption>Loss in nats a byte, running mean of {SMOOTHING} steps. The thin line lies on the
broad one where they agree.</figcaption></figure>
<figure class="single">
{charts.lines({"difference": apart}, "step", "difference, %", first, 180, "{:g}%", limit)}
<figcaption>Their difference. Rounding drives two runs apart with every step; more than the
allowed share would be an error of attention or of its gradients.</figcaption></figure>
{_table(agreement)}
<p class="soft">The first losses are compared one by one, the curves by their running means. The
gradients are those of all weights of the trained model, on one batch, with either attention:
there is no chaos in them.</p>
{_table(rows)}
<p class="soft">Losses are in nats a byte, the last one a running mean; tokens a second by the
median step. The first step of rowmax, with what is compiled in it, took
{duration(training.first_call)}.</p>
<h2>What it writes</h2>
<pre>{escape(printable(training.sample))}</pre>"""


def _long_sequence(long: LongSequence | None) -> str:
    if long is None:
        return '<h2>A long sequence</h2><p class="some">Not run (time).</p>'
    shape = long.shape
    rows = {
        "the score matrix would take": (float(shape.matrix_bytes), size(shape.matrix_bytes)),
        "peak beyond the inputs": (float(long.memory or 0), size(long.memory)),
        "of which the results": (float(long.results), size(long.results)),
    }
    text, kind = ("agree with", "good") if long.ok else ("differ from", "bad")
    found = [("Recomputed", *long.errors)]
    found.append(("Relative error", *(f"{error:.1e}" for error in long.errors.values())))
    return f"""
<h2>A long sequence</h2>
<p>{shape.n:,} positions, causal, {shape.heads} heads of {shape.d}, {shape.dtype}: forward in
<b>{duration(long.forward)}</b>, backward in <b>{duration(long.backward)}</b>.</p>
<figure>{charts.bars(rows)}
<figcaption>Memory. The results are out, lse, dq, dk and dv. Standard attention without tiles
holds the score matrix at least once forward and twice backward.</figcaption></figure>
<p class="{kind}">Rows and keys taken from it {text} the float64 definition
(allowed: {long.limit:.0e}).</p>
{_table(found)}"""


def _checks(checks: Checks) -> str:
    head = ["Feature"]
    for name in checks.backends:
        head += [f"{name}: forward", "gradients"]
    rows = [tuple(head)]
    for feature, row in checks.rows.items():
        cells = (cell for name in checks.backends for cell in _cells(row[name]))
        rows.append((escape(feature), *cells))
    wrong = "".join(f'<p class="bad">{escape(note)}</p>' for note in checks.errors)
    absent = "".join(
        f'<p class="soft">{escape(name)}: {escape(why)}.</p>' for name, why in checks.absent.items()
    )
    return f"""
<h2>Every feature against the definition</h2>
<p>The relative error of out and lse, and of all gradients, against the dense definition in
float64; in {checks.dtype} unless said. Each tensor is held to at most twice the error of standard
attention in the same dtype, three times for gradients.</p>
{wrong}{_table(rows, escaped=True)}{absent}"""


def _cells(result: Result) -> list[str]:
    if result.left_out:
        return ['<span class="some">not run (time)</span>'] * 2
    kind = "good" if result.ok else "bad"
    refused = f'<span class="soft" title="{escape(result.refusal or "")}">refused</span>'
    return [
        refused if x is None else f'<span class="{kind}">{x:.1e}</span>'
        for x in (result.forward, result.gradients)
    ]


def _table(rows: list[tuple[str, ...]], escaped: bool = False) -> str:
    def line(cells: tuple[str, ...], tag: str) -> str:
        inner = (f"<{tag}>{c if escaped else escape(c)}</{tag}>" for c in cells)
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(line(row, "td") for row in rows[1:])
    return (
        f'<div class="wide"><table><thead>{line(rows[0], "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
