"""The scikit-learn digits: 1797 grey images of 8 x 8 pixels, ten classes.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository 1998
(licence CC BY 4.0); the copy inside the scikit-learn wheel, so nothing is downloaded.
"""

from __future__ import annotations

import torch

from odeformer.data.images import Images


def digits(*, n_test: int = 360) -> Images:
    """The task, pixels scaled to [-1, 1]; a fixed shuffle puts n_test images aside for testing.

    Raises ImportError where scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits data needs scikit-learn: pip install 'odeformer-depth[data]'") from error
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    y = torch.tensor(data.target, dtype=torch.int64)
    if isinstance(n_test, bool) or not isinstance(n_test, int) or not 0 < n_test < len(x):
        raise ValueError(f"n_test must be an int from 1 to {len(x) - 1}, got {n_test!r}")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return Images("digits", 10, x[n_test:], y[n_test:], x[:n_test], y[:n_test])
