"""The style of all pages, light and dark. It loads no other files."""

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --line: #d9d9e0; --paper: #fff; --bad:
  #ce2c31; --good: #2b7a4b }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --soft: #b0b4ba; --line: #363a3f; --paper:
  #111113; --bad: #ff9592; --good: #71d083 } }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem } p { margin: .3rem 0 }
.soft { color: var(--soft) } .bad { color: var(--bad) } .good { color: var(--good) }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums } .wide { overflow-x: auto }
th { text-align: left; font-weight: 600 } th, td { padding: .15rem .6rem .15rem 0; border-bottom: 1px solid
  var(--line); vertical-align: top }
code { font-size: .85em } details { margin: .3rem 0 } summary { cursor: pointer }
"""

BARS = """
.plan { display: grid; grid-template-columns: max-content 1fr max-content; gap: .3rem .8rem; align-items: center;
  grid-auto-flow: dense }
.plan > .name { grid-column: 1; max-width: 26rem; overflow-wrap: anywhere } .plan > .bar { grid-column: 2 }
.plan > .size { grid-column: 3; text-align: right; font-variant-numeric: tabular-nums }
.bar { position: relative; height: 1.5rem; background: color-mix(in srgb, var(--line) 45%, transparent);
  border-radius: 3px }
.bar > span { position: absolute; top: 0; bottom: 0 }
.bar > i { position: absolute; top: -.2rem; bottom: -.2rem; border-left: 2px solid var(--ink) }
.bar.cut { clip-path: polygon(0 -20%, 100% -20%, 100% 0, calc(100% - .5rem) 25%, 100% 50%,
  calc(100% - .5rem) 75%, 100% 100%, 100% 120%, 0 120%) }
.bar > span.over { background: repeating-linear-gradient(45deg, var(--bad) 0 4px, transparent 4px 8px);
  border-bottom: 3px solid var(--bad) }
.bar > i.room { border-left: 1px dashed var(--soft) }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .6rem 0 } .key span { white-space: nowrap }
.key .soft { white-space: normal }
.key b { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem }
svg { display: block; width: 100%; height: auto } svg text { fill: var(--soft); font: 12px system-ui, sans-serif }
td.n, th.n { text-align: right }
@media (max-width: 40rem) { .plan { grid-template-columns: minmax(0, 1fr) max-content; grid-auto-flow: row }
  .plan > .size { grid-column: 2 } .plan > .bar { grid-column: 1 / 3; margin-bottom: .5rem } }
"""
"""Bars of one scale beneath each other, with their names and sizes."""

PALETTE = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#999999")
"""Colours that colour-blind people can distinguish (Okabe and Ito 2008)."""
