"""The style sheet of the report: light and dark, wide and on a phone."""

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fbfaf8; --card: #ffffff; --ink: #1d1c1a; --soft: #625e58; --rule: #e0dbd3;
  --good: #1f7a4a; --some: #8a5a00; --bad: #b3261e; --s0: #c2410c; --s1: #1d4ed8;
  --good-ground: #e8f5ee; --some-ground: #fdf3dc; --bad-ground: #fdeae8; --track: #eeeae4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #161513; --card: #1f1d1b; --ink: #ece9e4; --soft: #aaa49a; --rule: #3b3732;
    --good: #5cc98d; --some: #f0b429; --bad: #ff8a80; --s0: #fb923c; --s1: #7aa2ff;
    --good-ground: #16291f; --some-ground: #2c240f; --bad-ground: #331a18; --track: #302c28;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .25rem; letter-spacing: -.01em; }
h2 { font-size: 1.35rem; margin: 3rem 0 .5rem; letter-spacing: -.005em; }
h3 { font-size: .95rem; font-weight: 600; margin: 0; }
p { margin: .5rem 0; max-width: 46rem; }
a { color: inherit; }
.soft { color: var(--soft); }
.good { color: var(--good); } .some { color: var(--some); }
.bad { color: var(--bad); font-weight: 600; }
.icon { font-weight: 700; margin-right: .45em; }
.verdict { font-size: 1.2rem; font-weight: 650; padding: .8rem 1.1rem; border-radius: .6rem;
  border-left: .4rem solid currentColor; margin: 1.25rem 0 .75rem; max-width: none; }
.verdict.good, .tile.good { background: var(--good-ground); }
.verdict.some, .tile.some { background: var(--some-ground); }
.verdict.bad, .tile.bad { background: var(--bad-ground); }
.note { padding: .6rem 1rem; border: 1px solid currentColor; border-radius: .6rem;
  max-width: none; }
.tiles { display: grid; gap: .8rem; margin: 1.5rem 0 0;
  grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); }
.tile { border: 1px solid var(--rule); border-top: .25rem solid currentColor;
  border-radius: .6rem; padding: .8rem 1rem .9rem; }
.tile b { display: block; font-size: 1.55rem; line-height: 1.3; font-weight: 650;
  font-variant-numeric: tabular-nums; }
.tile > span { color: var(--ink); font-size: .92rem; font-weight: 400; line-height: 1.4;
  display: block; }
.tile > span.limit { color: var(--soft); margin-top: .25rem; }
figure { margin: 1.1rem 0; background: var(--card); border: 1px solid var(--rule);
  border-radius: .6rem; padding: 1rem; }
figcaption { color: var(--soft); font-size: .92rem; margin-top: .5rem; }
svg { display: block; max-width: 100%; height: auto; font: 14px system-ui, sans-serif; }
svg.phone-only { display: none; }
svg .grid { stroke: var(--rule); } svg .limit { stroke: var(--bad); stroke-dasharray: 5 5; }
svg .tick { fill: var(--soft); } svg .label { fill: var(--ink); }
svg .curve { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
svg .curve.s0 { stroke: var(--s0); } svg .curve.s1 { stroke: var(--s1); }
svg .dot.s0 { fill: var(--s0); } svg .dot.s1 { fill: var(--s1); }
.broad svg .curve.s0 { stroke-width: 6; stroke-opacity: .5; }
.broad svg .curve.s1 { stroke-width: 1.6; }
.bars { display: grid; gap: .35rem; }
.bars.groups { gap: .9rem 2rem; grid-template-columns: repeat(auto-fill, minmax(24rem, 1fr)); }
.row { display: grid; gap: .1rem .75rem; align-items: center;
  grid-template-columns: 11rem 1fr 15rem; font-size: .92rem; }
.groups .row { grid-template-columns: 4.5rem 1fr 6rem; }
.row .figure { font-variant-numeric: tabular-nums; }
.track { position: relative; height: .8rem; border-radius: .25rem; background: var(--track);
  overflow: hidden; }
.track i { position: absolute; inset: 0 auto 0 0; border-radius: .25rem 0 0 .25rem;
  background: currentColor; }
.bars[style] .track::after { content: ""; position: absolute; top: 0; bottom: 0;
  left: var(--mark); width: 2px; background: var(--ink); }
.scroll { overflow-x: auto; border: 1px solid var(--rule); border-radius: .5rem;
  margin: 1rem 0; max-width: 100%; background:
    linear-gradient(to left, var(--card) 40%, transparent) right / 3rem 100% no-repeat local,
    linear-gradient(to left, var(--soft), transparent) right / .9rem 100% no-repeat scroll,
    var(--card); }
figure h3 { margin-bottom: .6rem; } .group h3 { margin-bottom: .2rem; }
figure .scroll { margin: .8rem 0 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: .92rem; }
th, td { padding: .4rem .75rem; border-bottom: 1px solid var(--rule); text-align: left;
  white-space: nowrap; }
tbody tr:last-child td { border-bottom: 0; }
th { font-weight: 600; vertical-align: bottom; } tr > :not(:first-child) { text-align: right; }
tr > :first-child { position: sticky; left: 0; background: var(--card); white-space: normal;
  min-width: 4.5rem; }
summary { cursor: pointer; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: .6rem;
  padding: .8rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .9rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
footer { margin-top: 3rem; color: var(--soft); font-size: .92rem; }
@media (max-width: 960px) {
  svg.wide-only { display: none; } svg.phone-only { display: block; margin: 0 auto; }
}
@media (max-width: 600px) {
  th { white-space: normal; } th, td { padding: .4rem .6rem; }
  main { padding: 1.25rem 1rem 3rem; }
  figure { padding: .8rem .7rem; }
  .tiles, .bars.groups { grid-template-columns: 1fr; }
  .row { grid-template-columns: 1fr; } .row .name { font-weight: 500; }
  .groups .row { grid-template-columns: 4rem 1fr 5.5rem; }
}
"""
