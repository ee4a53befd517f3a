"""The report as one HTML page without any other file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from rowmax.cli.checks import Checks, Result

from . import charts
from .charts import Axes, Limit
from .format import count, duration, size, times
from .long_sequence import LongSequence
from .report import DemoReport
from .speed import Measurement, Speed
from .style import STYLE
from .training import SMOOTHING, Training

ICONS = {"good": "\N{CHECK MARK}", "some": "!", "bad": "\N{BALLOT X}"}
NOT_RUN = '<p class="some">Not run (time).</p>'


def render(report: DemoReport) -> str:
    """Return the whole page."""
    kind = {0: "good", 1: "bad"}.get(report.exit_code, "some")
    sections = (
        _tiles(report),
        _speed(report.speed),
        _checks(report.checks, report.rule),
        _training(report.training),
        _long_sequence(report.long_sequence),
        _machine(report),
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
<p class="verdict {kind}"><span class="icon">{ICONS[kind]}</span>{escape(report.verdict)}</p>
{_warnings(report)}
{"".join(sections)}
<footer><p>Times, memory, losses and errors on this page were measured on the machine and the day
named at its head. Ratios, shares and the sizes of score matrices are computed. The same numbers
are in <code>{escape(report.json_name)}</code>.</p></footer>
</main>
</body>
</html>
"""


def _warnings(report: DemoReport) -> str:
    """Return a line for a busy machine, and a list of the things left out."""
    busy = f'<p class="note some">{escape(report.busy)}</p>' if report.busy else ""
    notes = "".join(f"<li>{escape(text)}</li>" for text in report.left_out)
    return busy + (f'<ul class="some">{notes}</ul>' if notes else "<p>Nothing was left out.</p>")


# --- tiles ---------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """One result, its limit, and its colour."""

    value: str
    text: str
    limit: str
    kind: str


def _tiles(report: DemoReport) -> str:
    cells = (
        f'<div class="tile {tile.kind}"><b><span class="icon">{ICONS[tile.kind]}</span>'
        f"{escape(tile.value)}</b><span>{escape(tile.text)}</span>"
        f'<span class="limit">{escape(tile.limit)}</span></div>'
        for tile in _each_tile(report)
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _each_tile(report: DemoReport) -> Iterable[Tile]:
    """Yield the tiles of the parts that were run."""
    checks, training, long = report.checks, report.training, report.long_sequence
    right, checked = checks.count
    kind = "good" if right == checked and checks.ok else "bad"
    yield Tile(f"{right} of {checked}", "checks of features are right", "limit: all", kind)
    share = checks.largest_share
    if share is not None:
        kind = "good" if share <= 1 else "bad"
        yield Tile(_percent(share), "of the allowed error, at the most", "limit: 100 %", kind)
    if report.speed is not None:
        yield from _speed_tiles(report.speed)
    if training is not None:
        kind = "good" if training.ok else "bad"
        apart, allowed = training.agreement["curves"]
        text = "between the loss curves of one model, with rowmax and with SDPA"
        yield Tile(f"{100 * apart:.2g} %", text, f"limit: {100 * allowed:g} %", kind)
    if long is not None:
        kind = "good" if long.ok else "bad"
        worst = max(long.errors.values(), default=0.0)
        text = f"of the allowed error in a sequence of {long.shape.n:,}"
        yield Tile(_percent(worst / long.limit), text, "limit: 100 %", kind)


def _speed_tiles(speed: Speed) -> Iterable[Tile]:
    """Yield the ratios to SDPA. Slower than SDPA is no failure."""
    longest, largest = speed.longest, speed.largest
    if longest is not None and longest.ratio is not None:
        kind = "good" if longest.ratio >= 1 else "some"
        text = f"SDPA's speed, forward and backward, N {longest.n:,}, causal"
        yield Tile(times(longest.ratio), text, "SDPA: 1 \N{MULTIPLICATION SIGN}", kind)
    if largest is not None and largest.sdpa:
        kind = "good" if largest.rowmax <= 1.1 * largest.sdpa else "some"
        text = f"at the peak beyond the inputs, N {largest.n:,}, forward and backward"
        yield Tile(f"{largest.rowmax:.3g} MiB", text, f"SDPA: {largest.sdpa:.3g} MiB", kind)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# --- speed ---------------------------------------------------------------------------------------


def _speed(speed: Speed | None) -> str:
    if speed is None or not speed.measurements:
        return f"<h2>Is it fast?</h2>{NOT_RUN}"
    ratios = speed.ratios
    faster, kind = sum(r >= 1 for r in ratios), "good" if speed.mean >= 1 else "some"
    verdict = ""
    if ratios:
        verdict = (
            f'<p class="{kind}">Faster than SDPA in {faster} of {len(ratios)} measurements: '
            f"{times(min(ratios))} to {times(max(ratios))} its speed, "
            f"{times(speed.mean)} in the geometric mean.</p>"
        )
    return f"""
<h2>Is it fast?</h2>
<p>Next to PyTorch's own attention (<code>scaled_dot_product_attention</code>, SDPA), in one
process: {speed.heads} heads of {speed.d}, {speed.dtype} unless said. The two take turns; a time is
the median of their turns. Memory is measured in a process for each.</p>
{verdict}
{_by_length(speed, "both", "Forward and backward, causal", "ms")}
{_by_length(speed, "forward", "Forward, causal", "ms")}
{_by_length(speed, "memory", "Peak memory beyond the inputs, forward and backward, causal", "MiB")}
{_by_feature(speed, "both", "forward and backward")}
{_by_feature(speed, "forward", "forward")}"""


def _by_length(speed: Speed, what: str, title: str, unit: str) -> str:
    """Return a chart and a table of times or of memory by length."""
    found = sorted(speed.of("length", what), key=lambda m: m.n)
    if not found:
        return ""
    series = {
        "rowmax": [(float(m.n), m.rowmax) for m in found],
        "SDPA": [(float(m.n), m.sdpa) for m in found if m.sdpa],
    }
    chart = ""
    if len(found) > 1:
        chart = charts.lines(series, Axes("N", unit, "{:g}", "{:g}", doubling=True))
    rows: list[tuple[str, ...]] = [("N", f"rowmax, {unit}", f"SDPA, {unit}", "SDPA / rowmax")]
    for m in found:
        ratio = f"{m.ratio:.2f}" if m.ratio else ""
        rows.append((f"{m.n:,}", f"{m.rowmax:.3g}", f"{m.sdpa:.3g}" if m.sdpa else "", ratio))
    scale = "<figcaption>Logarithmic on both axes; lower is better.</figcaption>" if chart else ""
    return f"""
<figure><h3>{title}</h3>{chart}{scale}{_table(rows)}</figure>"""


def _by_feature(speed: Speed, what: str, title: str) -> str:
    """Return a bar for each feature: rowmax's speed as a multiple of SDPA's."""
    found = speed.of("feature", what)
    if not found:
        return ""
    longest = max([2.0, *(m.ratio for m in found if m.ratio)])
    bars = "".join(_feature_bar(m, longest) for m in found)
    return f"""
<figure><h3>Speed by feature, {title}, N {found[0].n:,}</h3>
<div class="bars" style="--mark: {100 / longest:.1f}%">{bars}</div>
<figcaption>As a multiple of SDPA's speed: the line marks SDPA, longer is better.</figcaption>
</figure>"""


def _feature_bar(m: Measurement, longest: float) -> str:
    if m.ratio is None or m.sdpa is None:
        return _bar(m.name, 0.0, f"{m.rowmax:.3g} ms; SDPA does not compute it", "some")
    text = f"{times(m.ratio)} ({m.rowmax:.3g} ms, SDPA {m.sdpa:.3g})"
    return _bar(m.name, m.ratio / longest, text, "good" if m.ratio >= 1 else "some")


def _bar(name: str, share: float, text: str, kind: str) -> str:
    """Return a bar of a share of the track, with its text below its name."""
    width = 100 * min(1.0, max(0.0, share))
    return (
        f'<div class="row"><span class="name">{escape(name)}</span>'
        f'<span class="track"><i class="{kind}" style="width: {width:.1f}%"></i></span>'
        f'<span class="{kind} figure">{escape(text)}</span></div>'
    )


# --- checks --------------------------------------------------------------------------------------


def _checks(checks: Checks, rule: str) -> str:
    bars = "".join(
        f'<div class="group"><h3>{escape(feature)}</h3>'
        + "".join(_check_bar(name, row[name]) for name in checks.backends)
        + "</div>"
        for feature, row in checks.rows.items()
    )
    head = ["Feature"]
    for name in checks.backends:
        head += [f"{name}: forward", f"{name}: gradients"]
    rows = [tuple(head)]
    for feature, row in checks.rows.items():
        rows.append((feature, *(x for name in checks.backends for x in _errors(row[name]))))
    wrong = "".join(f'<p class="bad">{escape(note)}</p>' for note in checks.errors)
    absent = "".join(
        f'<p class="soft">{escape(name)}: {escape(why)}.</p>' for name, why in checks.absent.items()
    )
    right, checked = checks.count
    backends = f"{len(checks.backends)} backend{'s' if len(checks.backends) > 1 else ''}"
    return f"""
<h2>Is it right?</h2>
<p>{right} of {checked} checks are right: {len(checks.rows)} features on {backends}, in
{checks.dtype} unless said. The dense definition in float64 is the reference. A bar is the largest
error of out, lse and all gradients, as a share of what <a href="{escape(rule)}">the rule</a>
allows: for out twice the error of standard attention in the same dtype, for gradients three times.
</p>
{wrong}
<figure><div class="bars groups">{bars}</div>
<figcaption>Error as a share of what is allowed; the right end of a track is 100 %.</figcaption>
</figure>
<details><summary>Relative errors, in norm</summary>{_table(rows)}</details>
{absent}"""


def _check_bar(name: str, result: Result) -> str:
    """Return the bar of one feature on one backend."""
    if result.left_out:
        return _bar(name, 0.0, "not run (time)", "some")
    shares = [x for x in result.shares if x is not None]
    if result.forward is None:
        return _bar(name, 0.0, "refused", "soft")
    share = max(shares, default=0.0)
    return _bar(
        name, share, _percent(share) if result.ok else "wrong", "good" if result.ok else "bad"
    )


def _errors(result: Result) -> list[str]:
    """Return the relative errors of one result: forward, gradients."""
    if result.left_out:
        return ["not run (time)"] * 2
    return ["refused" if x is None else f"{x:.1e}" for x in (result.forward, result.gradients)]


# --- training and the long sequence --------------------------------------------------------------


def _training(training: Training | None) -> str:
    if training is None:
        return f"<h2>A small GPT, trained twice</h2>{NOT_RUN}"
    plan, curves = training.plan, training.curves
    smooth = {name: curve.smooth for name, curve in curves.items()}
    ours, theirs = smooth.values()
    first = training.steps - len(ours) + 1
    apart = [
        (first + n, 100 * abs(a - b) / b) for n, (a, b) in enumerate(zip(ours, theirs, strict=True))
    ]
    series = {
        name: [(first + n, y) for n, y in enumerate(values)] for name, values in smooth.items()
    }
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
    limit = Limit(allowed, f"allowed: {allowed:g} %")
    return f"""
<h2>A small GPT, trained twice</h2>
<p>{count(training.parameters)} parameters, {plan.size.layers} layers, bytes for tokens,
{plan.size.context} to a row and {plan.rows} rows to a step, in {precision}; the text is
{training.files} files, {size(training.corpus_bytes)}, of Python's standard library. The same
model from the same start saw the same batches twice: once with rowmax, once with SDPA. Their steps
took turns: {training.steps} each, of {training.asked} where there is time.</p>
<p class="{kind}"><span class="icon">{ICONS[kind]}</span>The two {text}.</p>
<figure class="broad">{charts.lines(series, Axes("step", "loss, nats a byte"))}
<figcaption>Loss in nats a byte, running mean of {SMOOTHING} steps. The thin line lies on the
broad one where they agree.</figcaption></figure>
<figure>
{charts.lines({"difference": apart}, Axes("step", "difference of the losses, %"), limit)}
<figcaption>Their difference. Rounding drives two runs apart with every step, in either direction;
more than the allowed share would be an error of attention or of its gradients. The held-out losses
differ by the same rounding.</figcaption></figure>
{_table(agreement)}
<p class="soft">The first losses are compared one by one, the curves by their running means. The
gradients are those of all weights of the trained model, on one batch, with either attention:
there is no chaos in them.</p>
{_table(rows)}
<p class="soft">Losses are in nats a byte, the last one a running mean; tokens a second by the
median step. The first step of rowmax, with what is compiled in it, took
{duration(training.first_call)}.</p>"""


def _long_sequence(long: LongSequence | None) -> str:
    if long is None:
        return f"<h2>A long sequence</h2>{NOT_RUN}"
    shape = long.shape
    kind, text = ("good", "agree with") if long.ok else ("bad", "differ from")
    bars = "".join(
        _bar(name, error / long.limit, f"{error:.1e}", kind) for name, error in long.errors.items()
    )
    return f"""
<h2>A long sequence</h2>
<p>{shape.n:,} positions, causal, {shape.heads} heads of {shape.d}, {shape.dtype}: forward in
<b>{duration(long.forward)}</b>, backward in <b>{duration(long.backward)}</b>. The peak of memory
beyond the inputs was {size(long.memory)}, of which the results (out, lse, dq, dk and dv) are
{size(long.results)}. A score matrix, which neither rowmax nor SDPA allocates here, would have
{size(shape.matrix_bytes)} (computed).</p>
<p class="{kind}"><span class="icon">{ICONS[kind]}</span>Rows and keys taken from it {text} the
float64 definition.</p>
<figure><div class="bars">{bars}</div>
<figcaption>Relative errors; the right end of a track is the limit, {long.limit:.0e}.</figcaption>
</figure>"""


# --- the machine ---------------------------------------------------------------------------------


def _machine(report: DemoReport) -> str:
    """Return the facts of the machine, the time it took, and the command to repeat it."""
    machine = report.machine
    rows = [("Fact", "Value"), *machine.facts]
    if None not in (machine.load, report.load):
        rows.append(
            ("load average", f"{machine.load:.1f} at the start, {report.load:.1f} at the end")
        )
    rows.append(("time", f"{duration(report.seconds)} of the {duration(report.allowed)} allowed"))
    return f"""
<h2>The machine</h2>
{_table(rows)}
<p>To repeat it, in the repository:</p>
<pre>{escape(report.command)}</pre>"""


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in a frame that scrolls; its first column stays in view."""

    def line(cells: Sequence[str], tag: str) -> str:
        inner = (f"<{tag}>{escape(c)}</{tag}>" for c in cells)
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(line(row, "td") for row in rows[1:])
    return (
        f'<div class="scroll" tabindex="0"><table><thead>{line(rows[0], "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
