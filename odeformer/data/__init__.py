"""Real data sets by name: ``DATA[name]()`` gives the task, loaded on first use."""

from odeformer.data.digits import digits

DATA = {
    "digits": digits,
}
