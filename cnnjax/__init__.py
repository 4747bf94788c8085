"""Convolutional networks in JAX/Flax: one definition, any parallel layout, the same numbers.

The parts are modules: `cnnjax.networks`, `cnnjax.model`, `cnnjax.step`, ... Importing the package loads none of them.
"""
