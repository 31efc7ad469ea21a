"""The report: a run folder as one self-contained HTML page."""

from pathlib import Path


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a finished run's folder.

    The same folder gives the same bytes.

    Parameters
    ----------
    folder : Path
        A run folder (:mod:`fl_perpcs.runs`).

    Returns
    -------
    Path
        The page.

    Raises
    ------
    PerPcsError
        If the folder holds no run, or one that did not finish.
    """
    # matplotlib and jinja2 take a second to import; only this function needs them.
    from fl_perpcs.report.facts import read_facts
    from fl_perpcs.report.page import render_page
    from fl_perpcs.runs import write_atomically

    path = folder / "report.html"
    write_atomically(path, render_page(read_facts(folder)))
    return path


__all__ = ["write_report"]
