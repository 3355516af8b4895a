"""The report page's style sheet: light and dark, wide tables scroll, curves and bars take their colour from ``--c``."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
:root {
  --ink: #1d2330; --dim: #667085; --line: #e4e7ec; --page: #ffffff; --panel: #f8f9fb;
  --c1: #2f6fde; --c2: #d9632b; --c3: #2e9e6b; --c4: #8a5cd1;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e9ef; --dim: #98a2b3; --line: #343a46; --page: #14171d; --panel: #1b1f27;
    --c1: #6ea2ff; --c2: #f08a55; --c3: #4fc890; --c4: #b08cf0;
  }
}
.c1 { --c: var(--c1) } .c2 { --c: var(--c2) } .c3 { --c: var(--c3) } .c4 { --c: var(--c4) }
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 1080px; margin: 2rem auto; padding: 0 1rem;
}
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 1.05rem; margin: 0 0 .4rem }
.sub { color: var(--dim); margin: .2rem 0 1.4rem }
.bad { color: var(--c2); font-weight: 600 }
section {
  background: var(--panel); border: 1px solid var(--line); border-radius: 8px;
  padding: 1rem 1.2rem; margin-bottom: 1rem; overflow-x: auto;
}
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 1rem; margin-bottom: 1rem }
.pair section { margin: 0 }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .22rem .8rem .22rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
th { font-weight: 600 }
.n { text-align: right }
.note, .legend { color: var(--dim); font-size: .88rem; margin: .4rem 0 0 }
.legend span { margin-right: 1.2rem }
.legend i {
  display: inline-block; width: .9em; height: .9em; border-radius: 2px;
  margin-right: .4em; vertical-align: -.1em; background: var(--c);
}
svg { width: 100%; height: auto; display: block }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink) }
svg .tick, svg .axis { fill: var(--dim) }
.grid { stroke: var(--line) }
.curve { fill: none; stroke: var(--c); stroke-width: 2 }
.mark, .bar { fill: var(--c) }
"""
