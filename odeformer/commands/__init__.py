"""The sub-commands of ``odeformer``, one a file: each has HELP, ``arguments(parser)`` and ``run(parser, argv)``.

Nothing heavy is imported until one runs.
"""
