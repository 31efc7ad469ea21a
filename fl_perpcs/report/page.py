"""The page: one HTML file that loads nothing.

The template is a string, because an app bundle of Flower packs no HTML files.
"""

import json
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fl_perpcs.config import REFERENCES, Config
from fl_perpcs.report.facts import Facts, by_group, gains, is_number
from fl_perpcs.report.heatmaps import choices_figure, layers_figure
from fl_perpcs.report.plots import gains_figure, hubs_figure, method_name
from fl_perpcs.results import ANSWERS, COSTS, LOSS, titled

NONE = "\N{EN DASH}"
ROLES = {
    "base": ("base users", "adapt the base LLM to the task"),
    "candidates": ("candidates", "may be selected as sharers"),
    "targets": ("targets", "are served and evaluated"),
}


def render_page(facts: Facts) -> str:
    """Return the report of a run as HTML."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {"number": number, "percent": percent, "size": size, "span": span}
    environment.filters |= {"ends": ends, "titled": titled}
    return environment.from_string(TEMPLATE).render(
        facts=facts,
        name=facts.config.run.name,
        title=facts.results.get("title") or facts.results.get("task") or "",
        answers=ANSWERS.get(str(facts.results.get("answers")), ""),
        dropped=any(row.get("dropped") for row in facts.results.get("methods", [])),
        intervals=any(row.get("intervals") for row in facts.results.get("methods", [])),
        date=str(facts.versions.get("started", "")).replace("T", " ")[:16],
        tiles=tiles(facts),
        paid=COSTS if all("costs" in r for r in facts.results.get("methods", [])) else (),
        table=result_table(facts),
        metrics=metric_names(facts),
        figures=figures(facts),
        per_target=per_target(facts),
        pool=facts.pool,
        roles=[(*ROLES.get(role, (role, "")), ids) for role, ids in role_ids(facts).items()],
        costs=costs(facts),
        settings=settings(facts.config),
        changed=sum(value != default for _, value, default in settings(facts.config)),
        versions={
            key: value for key, value in facts.versions.items() if key not in ("machine", "started")
        },
        method_name=method_name,
    )


def number(value: Any) -> str:
    """Write a number with as many digits as are read: 0.4375 → 0.438, 12345.6 → 12,346."""
    if not is_number(value):
        return NONE
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def percent(value: Any) -> str:
    """Write a share: 0.613 → 61 %."""
    return f"{100 * value:.0f}\N{NO-BREAK SPACE}%" if is_number(value) else NONE


def ends(interval: Any) -> str:
    """Write an interval: [0.62, 0.75] → [0.620, 0.750]; nothing if there is none."""
    return f"[{', '.join(map(number, interval))}]" if interval else ""


def size(value: Any) -> str:
    """Write a number of bytes: 1234567 → 1.2 MB."""
    if not is_number(value):
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def span(seconds: Any) -> str:
    """Write a duration: 75.2 → 1 min 15 s."""
    if not is_number(seconds):
        return NONE
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def metric_names(facts: Facts) -> list[str]:
    """Return the metrics beside the loss, the main one first."""
    names = {name for row in facts.results.get("methods", []) for name in row.get("metrics", {})}
    return sorted(names, key=lambda name: (name != facts.main_metric, name))


def result_table(facts: Facts) -> list[dict[str, Any]]:
    """Return the result table's rows, with how many users a method serves better."""
    rows = []
    for row in facts.results.get("methods", []):
        better = gains(facts.scores, row["method"], LOSS)
        helped = sum(gain > 0 for gain in better.values())
        known = better and row["method"] != "base"
        rows.append({**row, "helped": f"{helped} of {len(better)}" if known else NONE})
    return rows


def tiles(facts: Facts) -> list[tuple[str, str]]:
    """Return the run in a few numbers: (value, what it is)."""
    rows = {row["method"]: row for row in facts.results.get("methods", [])}
    found = []
    base = rows.get("base")
    own = next((row for name, row in rows.items() if name not in REFERENCES), None)
    if own and is_number(own.get("gain")):
        found.append((percent(own["gain"]), f"of OPPU's gain in {facts.main_metric}"))
    if base and own:
        name = method_name(own["method"])
        change = f"{number(base.get('loss'))} → {number(own.get('loss'))}"
        found.append((change, f"loss per response token, base LLM → {name}"))
        metric = facts.main_metric
        if metric != LOSS and metric in base.get("metrics", {}):
            before, after = (row.get("metrics", {}).get(metric) for row in (base, own))
            found.append((f"{number(before)} → {number(after)}", f"{metric}, base LLM → {name}"))
    if facts.choices and facts.choices.groups_differ:
        first, same = facts.choices.first, facts.choices.same_group
        text = f"of first choices from the target's own group (chance {percent(same.mean())})"
        found.append((percent((first * same).sum() / first.sum()), text))
    return found


def figures(facts: Facts) -> list[dict[str, Any]]:
    """Return the figures that the run has data for."""
    targets = facts.role("targets")
    evaluated = {user for by_user in facts.scores.values() for user in by_user}
    users = [*targets, *sorted(evaluated - set(targets))]
    drawn = [
        (
            "Gains over the base LLM",
            gains_figure(facts.scores, facts.methods, facts.main_metric, users),
            "Each row is a target and each mark a method; the further right of the base LLM's"
            " line, the more that target gains.",
        )
    ]
    if facts.choices:
        found = by_group(facts.choices)
        framed = " Frames mark sharers of the target's own group." if found.groups_differ else ""
        drawn += [
            (
                "Who picked whose pieces",
                choices_figure(found),
                "The stronger a cell's colour, the more of the target's adapter comes from that"
                f" sharer, averaged over all sites; each row adds up to {percent(1)}.{framed}",
            ),
            (
                "Who picked whose pieces, layer by layer",
                layers_figure(found),
                "The same, averaged over the sites of one layer, rows and columns in the same"
                " order: stripes from top to bottom are sharers that everybody picks.",
            ),
            (
                "Popular sharers",
                hubs_figure(found),
                "How often a sharer's piece had the greatest weight, over all targets and"
                " sites; bars far above the dashed line are hubs.",
            ),
        ]
    # Markup: the SVG is ours, and the names in it are escaped already.
    return [
        {"title": title, "svg": Markup(svg), "caption": caption}
        for title, svg, caption in drawn
        if svg
    ]


def per_target(facts: Facts) -> dict[str, Any]:
    """Return the numbers behind the gains figure: methods and one row per user."""
    metric = facts.main_metric
    wanted = [LOSS] if metric == LOSS else [metric, LOSS]
    head = [(method, name) for method in facts.methods for name in wanted]
    users = [
        user for user in facts.role("targets") if any(user in s for s in facts.scores.values())
    ]
    rows = []
    for user in users:
        own = [facts.scores.get(method, {}).get(user, {}).get(name) for method, name in head]
        rows.append((user, facts.groups.get(user, ""), own))
    return {"head": head, "rows": rows}


def role_ids(facts: Facts) -> dict[str, list[str]]:
    """Return the users of each role, the known roles first."""
    roles: Mapping[str, list[str]] = facts.results.get("roles") or {}
    order = [*(role for role in ROLES if role in roles), *sorted(set(roles) - set(ROLES))]
    return {role: list(roles[role]) for role in order}


def costs(facts: Facts) -> list[dict[str, str]]:
    """Return the times and sizes that targets reported: mean and range, phase by phase."""
    targets = set(facts.role("targets"))
    values: dict[tuple[str, str], list[float]] = {}
    for row in facts.rows:
        if row.get("user") in targets:
            for key, value in row.items():
                if is_number(value) and ("seconds" in key or "bytes" in key):
                    values.setdefault((str(row.get("phase")), key), []).append(value)
    return [{"phase": phase, "what": key, **_range(key, v)} for (phase, key), v in values.items()]


def _range(key: str, values: Iterable[float]) -> dict[str, str]:
    found = list(values)
    write = size if "bytes" in key else span
    return {
        "mean": write(statistics.fmean(found)),
        "range": f"{write(min(found))} to {write(max(found))}",
    }


def settings(config: Config) -> list[tuple[str, str, str]]:
    """Return every key of the config as (key, value, default), written as in TOML."""
    default = Config().flat()
    return [
        (key, json.dumps(value, ensure_ascii=False), json.dumps(default[key]))
        for key, value in config.flat().items()
    ]


TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<title>{{ name }} · Per-Pcs run</title>
<style>
:root {
  --surface: #fcfcfb; --raised: #f3f2ee; --ink: #0b0b0b; --ink-2: #52514e; --line: #e1e0d9;
  --axis: #b9b8ad; --s1: #2a78d6; --s2: #e0602b; --s3: #1a9c6c; --s4: #c98500; --s5: #4a3aa7;
  --s6: #d55181;
}
@media (prefers-color-scheme: dark) {
  :root {
    --surface: #1a1a19; --raised: #242423; --ink: #f5f5f3; --ink-2: #c3c2b7; --line: #32322f;
    --axis: #5c5b56; --s1: #3987e5; --s2: #e2703c; --s3: #27ab7e; --s4: #d39a1f; --s5: #9085e9;
    --s6: #e0648f;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 62rem; background: var(--surface);
  color: var(--ink); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans",
  "DejaVu Sans", sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.6rem; margin: 0; line-height: 1.25; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p { margin: .4rem 0; max-width: 46rem; }
.quiet, figcaption, caption { color: var(--ink-2); font-size: .9rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr));
  gap: .75rem; margin: 1.25rem 0 0; }
.tiles div { background: var(--raised); border-radius: .5rem; padding: .7rem .9rem; }
.tiles b { display: block; font-weight: 600; line-height: 1.3;
  font-size: clamp(1.05rem, 3.6vw, 1.35rem); }
.tiles span { color: var(--ink-2); font-size: .85rem; line-height: 1.35; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; caption-side: bottom; padding-top: .5rem; }
th, td { padding: .3rem 1.1rem .3rem 0; text-align: left; vertical-align: top; }
th { font-weight: 600; color: var(--ink-2); }
tbody th { color: var(--ink); white-space: nowrap; }
tr { border-bottom: 1px solid var(--line); }
.n { text-align: right; white-space: nowrap; }
.n small { display: block; color: var(--ink-2); }
.changed td { font-weight: 600; }
figure { margin: 0; }
figcaption { max-width: 46rem; margin-top: .6rem; }
svg { display: block; max-width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: inherit !important; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--ink-2); }
details[open] > summary { margin-bottom: .4rem; }
code { font: .85em ui-monospace, "SFMono-Regular", "DejaVu Sans Mono", monospace; }
@media print { details > * { display: block; } }
</style>
</head>
<body>
<h1>{{ name }}</h1>
<p class="quiet">Personalized Pieces run, strategy <code>{{ facts.config.strategy.name }}</code>
{%- if title %} · {{ title }}{% endif %}
{%- if answers %} · {{ answers }}{% endif %}
{%- if date %} · {{ date }}{% endif %}
{%- if facts.versions.machine is defined %} · {{ facts.versions.machine }}{% endif %}
{%- if facts.status %} · {{ facts.status }}{% endif %}</p>

{% if tiles %}
<div class="tiles">
{% for value, text in tiles %}
<div><b>{{ value }}</b><span>{{ text }}</span></div>
{% endfor %}
</div>
{% endif %}

{% if table %}
<h2>Results</h2>
<div class="wide">
<table>
<thead><tr><th>method</th><th class="n">loss per<br>response token ↓</th>
{% for metric in metrics %}<th class="n">{{ metric | titled }}</th>{% endfor %}
<th class="n">share of<br>OPPU's gain</th><th class="n">users with<br>a lower loss</th>
{% if paid %}
<th class="n">examples<br>forward</th><th class="n">examples<br>back</th>
<th class="n">trained<br>numbers</th><th class="n">stored<br>bytes</th>
{% endif %}
<th class="n">users</th><th class="n">queries</th>
{% if dropped %}<th class="n">of them<br>dropped</th>{% endif %}</tr></thead>
<tbody>
{% for row in table %}
{% set intervals = row.get("intervals", {}) %}
<tr><th>{{ method_name(row.method) }}</th>
<td class="n">{{ row.loss | number }}<small>{{ intervals.get("loss") | ends }}</small></td>
{% for metric in metrics %}
<td class="n">{{ row.metrics.get(metric) | number }}
<small>{{ intervals.get(metric) | ends }}</small></td>
{% endfor %}
<td class="n">{{ row.gain | percent }}</td><td class="n">{{ row.helped }}</td>
{% if paid %}
{% for cost in paid %}
<td class="n">{{ row.costs[cost] | round | int | number }}</td>
{% endfor %}
{% endif %}
<td class="n">{{ row.users | number }}</td><td class="n">{{ row.queries | number }}</td>
{% if dropped %}<td class="n">{{ row.get("dropped", 0) | number }}</td>{% endif %}</tr>
{% endfor %}
</tbody>
</table>
</div>
<p class="quiet">Over all queries of all targets{% if intervals %}, with 95 % bootstrap intervals
over users{% endif %}. An arrow ↓ marks what is better when lower.
{% if dropped %}Dropped queries do not fit <code>lm.max-length</code> with their gold outputs and
have no part in the loss. {% endif %}
OPPU is one adapter per user, trained on that user's history.
{% if paid %}Examples (forward and back through the base LLM), trained numbers and bytes are what a
target pays before its first query, on average. {% endif %}
{% if metrics %}Shares of OPPU's gain over the base LLM are in
{{ facts.main_metric }}.
{% else %}Nothing was answered: the response loss is the measure.
{% endif %}</p>
{% if per_target.rows %}
<details><summary>Every target's numbers</summary>
<div class="wide">
<table>
<thead><tr><th>target</th><th>group</th>
{% for method, metric in per_target.head %}
<th class="n">{{ method_name(method) }}<br>{{ metric | titled }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for user, group, values in per_target.rows %}
<tr><th>{{ user }}</th><td>{{ group }}</td>
{% for value in values %}<td class="n">{{ value | number }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
</details>
{% endif %}
{% endif %}

{% for figure in figures %}
<h2>{{ figure.title }}</h2>
<figure><div class="wide">{{ figure.svg }}</div>
<figcaption>{{ figure.caption }}</figcaption></figure>
{% endfor %}

{% if roles %}
<h2>Users</h2>
{% for title, does, ids in roles %}
<details><summary><b>{{ ids | length }} {{ title }}</b> {{ does }}</summary>
<p class="quiet">{{ ids | join(", ") }}</p></details>
{% endfor %}
{% endif %}

{% if pool %}
<h2>Pool</h2>
<p>{% if pool.get("pieces") %}{{ pool.pieces | number }} pieces of {% endif %}
{{ pool.get("sharers") | number }} sharers, {{ pool.get("bytes") | size }}
{%- if pool.get("sites") %}, at {{ pool.sites | length | number }} sites of the base LLM
{%- endif %}.</p>
{% if pool.get("sites") %}
<details><summary>Sites</summary>
<p class="quiet"><code>{{ pool.sites | join(" ") }}</code></p></details>
{% endif %}
{% if facts.refused %}
<p>Not let in (admission.rules):</p>
<ul>
{% for sharer, reason in facts.refused.items() %}
<li>{{ sharer }}: {{ reason }}</li>
{% endfor %}
</ul>
{% endif %}
{% endif %}

{% if costs %}
<h2>Costs per target</h2>
<div class="wide">
<table>
<thead><tr><th>phase</th><th>what</th>
<th class="n">mean</th><th class="n">range</th></tr></thead>
<tbody>
{% for row in costs %}
<tr><th>{{ row.phase }}</th><td>{{ row.what }}</td><td class="n">{{ row.mean }}</td>
<td class="n">{{ row.range }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
{% endif %}

{% if facts.traffic %}
<h2>Communication</h2>
<p>Bytes as serialized, over all users of a phase; ledger.parquet has every message. What is
reported to the researcher, such as answers and recipes, a real federation would keep on its
nodes.</p>
<div class="wide">
<table>
<thead><tr><th>phase</th><th class="n">users</th><th class="n">to users</th>
<th class="n">from users</th><th class="n">of it reported</th></tr></thead>
<tbody>
{% for row in facts.traffic %}
<tr><th>{{ row.phase }}</th><td class="n">{{ row.users | number }}</td>
<td class="n">{{ row.down | size }}</td><td class="n">{{ row.up | size }}</td>
<td class="n">{{ row.report | size }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
{% endif %}

{% if facts.phases %}
<h2>Phases</h2>
<div class="wide">
<table>
<thead><tr><th>phase</th><th class="n">wall time</th><th class="n">users</th></tr></thead>
<tbody>
{% for phase in facts.phases %}
<tr><th>{{ phase.name }}</th><td class="n">{{ phase.seconds | span }}</td>
<td class="n">{{ phase.users | number }}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
{% endif %}

<h2>Config</h2>
<details><summary>All {{ settings | length }} keys, {{ changed }} of them not at the
default</summary>
<div class="wide">
<table>
<thead><tr><th>key</th><th>value</th><th>default, where it differs</th></tr></thead>
<tbody>
{% for key, value, default in settings %}
<tr{% if value != default %} class="changed"{% endif %}><td><code>{{ key }}</code></td>
<td><code>{{ value }}</code></td><td>
{%- if value != default %}<code>{{ default }}</code>{% endif %}</td></tr>
{% endfor %}
</tbody>
</table>
</div>
</details>

{% if versions %}
<h2>Versions</h2>
<div class="wide">
<table>
<tbody>
{% for key, value in versions.items() %}
<tr><th>{{ key }}</th><td><code>{{ value }}</code></td></tr>
{% endfor %}
</tbody>
</table>
</div>
{% endif %}
</body>
</html>
"""
