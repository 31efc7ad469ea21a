"""What the figures share: colours, style, and the way to inline SVG.

Colours are written as CSS variables, which the page sets for light and for dark; text stays
text. Heat maps are one hue of growing opacity, so that they too suit either background.
"""

import html
import io
import re
import warnings
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

VARIABLES = ("surface", "ink", "ink-2", "line", "axis", "s1", "s2", "s3", "s4", "s5", "s6")
# Stand-ins that matplotlib draws with; inline_svg turns them into the page's variables.
COLOR = {name: f"#0a0b{number:02x}" for number, name in enumerate(VARIABLES, start=1)}

_HUE = (42 / 255, 120 / 255, 214 / 255)
HEAT = LinearSegmentedColormap.from_list("heat", [(*_HUE, 0.0), (*_HUE, 1.0)])

STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a user id is a dollar sign
    "font.size": 9,
    "text.color": COLOR["ink"],
    "axes.edgecolor": COLOR["axis"],
    "axes.labelcolor": COLOR["ink-2"],
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "xtick.color": COLOR["axis"],
    "ytick.color": COLOR["axis"],
    "xtick.labelcolor": COLOR["ink-2"],
    "ytick.labelcolor": COLOR["ink-2"],
    "grid.color": COLOR["line"],
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}

PERCENT = FuncFormatter(lambda share, _: f"{100 * share:g} %")


def short(name: str, most: int = 22) -> str:
    """Return a name cut in the middle, on one line."""
    name = " ".join(name.split())
    if len(name) <= most:
        return name
    head = (most - 1) * 2 // 3
    return f"{name[:head]}…{name[len(name) - (most - 1 - head) :]}"


def bare(axes: Axes) -> None:
    """Leave a chart only its lower axis; the grid does the rest."""
    axes.set_axisbelow(True)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.tick_params(length=0)


def inline_svg(figure: Figure, label: str) -> str:
    """Return a figure as SVG that can stand inside a page, the same bytes each time.

    Parameters
    ----------
    figure : Figure
        Drawn with :data:`STYLE` and :data:`COLOR`.
    label : str
        What it shows, for those who cannot see it.
    """
    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": label}), warnings.catch_warnings():
        # The browser has glyphs for names that matplotlib's own font lacks.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        figure.savefig(text, format="svg", transparent=True, bbox_inches="tight", metadata=nothing)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg, count=2)
    # Its style applies to the whole page, and its ids come again in the next figure.
    svg = re.sub(r"<style.*?</style>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    names = {color: name for name, color in COLOR.items()}
    svg = re.sub(rf"(?<=: )({'|'.join(names)})", lambda m: f"var(--{names[m[0]]})", svg)
    points = re.search(r'width="([0-9.]+)pt"', svg)
    pixels = float(points[1]) * 4 / 3 if points else 0.0
    # A narrow screen scrolls rather than shrink the text beyond reading.
    least = min(pixels, max(560.0, 0.8 * pixels))
    head = f'<svg role="img" aria-label="{html.escape(label)}" style="min-width:{least:.0f}px"'
    return head + svg.removeprefix("<svg")
