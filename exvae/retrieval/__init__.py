"""Retrieval augmented training (RAT): which exemplars count in a step.

draw.py    the M exemplars of a step
table.py   the table of latent means: fill, update, refresh, resize
slots.py   the choice of a step's exemplars, for every search
exact.py   search = exact: the K nearest rows of the table, inside the compiled step
index.py   an index of the table on the host, rebuilt in the background while training goes on
scann.py   search = scann: such an index by the ScaNN library
"""

NOBODY = -1  # an exemplar slot that holds nothing: padding, or a duplicate of another slot
