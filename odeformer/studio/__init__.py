"""The stability studio: one command gives a self-contained HTML report on solvers and models.

``stability_report(targets, path)`` writes it; ``odeformer stability`` calls that.
"""

from odeformer.studio.report import stability_report

__all__ = ["stability_report"]
