"""Draw what the steps of a run spent their time on, one above the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zbmd.tools.runs.plot_data import Spent
from zbmd.training.profiler.lines import IDLE

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

SHARE_MIN: Final = 0.01
"""What takes less than this part of all time is drawn with the others."""
OTHERS: Final = "other"
COLORS: Final = {
    "forward": "#7aa6ee",
    "backward": "#2f63c6",
    "recompute": "#5fb0c9",
    "optimizer": "#2f8f8a",
    "grad_clip": "#7ec4a5",
    "data": "#b9a63a",
    "host_device": "#8c7a4f",
    "comm": "#e08a3c",
    "bubble": "#f0c27a",
    "checkpoint": "#9a6fc4",
    "evaluate": "#c79bd9",
    "digest": "#b56a8c",
    OTHERS: "#7d6f66",
    IDLE: "#dfe3e8",
}
SPENT_DARK: Final = {
    "#7aa6ee": "#5c86c9",
    "#2f63c6": "#3d6fcf",
    "#5fb0c9": "#4a93a9",
    "#2f8f8a": "#3a9a94",
    "#7ec4a5": "#63a386",
    "#b9a63a": "#a8962f",
    "#8c7a4f": "#9b895c",
    "#e08a3c": "#cf7c30",
    "#f0c27a": "#c79c57",
    "#9a6fc4": "#8f66bb",
    "#c79bd9": "#a67bb8",
    "#b56a8c": "#a35c7c",
    "#7d6f66": "#8a7c72",
    "#dfe3e8": "#2a3038",
}
"""What each colour becomes on a dark page."""


def draw_spent(axes: Axes, spent: Spent) -> list[Artist]:
    """Draw it; returns what the key is made of. Names that hardly show are drawn as one."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    all_ms = max(float(spent.ms.sum()), 1e-9)
    shown = [
        row
        for row, name in enumerate(spent.names)
        if name == IDLE or spent.ms[row].sum() >= SHARE_MIN * all_ms
    ]
    rest = [row for row in range(len(spent.names)) if row not in shown]
    layers = [(spent.names[row], spent.ms[row]) for row in shown]
    if rest:
        layers.insert(len(layers) - 1, (OTHERS, spent.ms[rest].sum(axis=0)))
    colors = [COLORS[name] for name, _ in layers]
    axes.stackplot(spent.steps, *(ms for _, ms in layers), colors=colors, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    return [
        Patch(color=color, label=f"{name} {ms.sum() / all_ms:.0%}")
        for (name, ms), color in zip(layers, colors, strict=True)
    ]
