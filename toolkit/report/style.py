"""How the pages look: one style for all, light and dark, nothing loaded from anywhere."""

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
