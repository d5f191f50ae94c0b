"""The Triton Inference Server's way in: its model repository, and the models in it.

Not named ``triton``: the folder would stand in for the package of that name wherever a
script of ``runtime/`` runs.
"""
