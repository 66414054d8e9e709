"""Retrieval augmented training (RAT): the choice of the exemplars of a step.

draw.py    draws the M exemplars of a step
table.py   the table of latent means: fill, update, refresh, resize
slots.py   chooses the exemplars of a step, for every search
exact.py   search = exact: the K nearest rows of the table, inside the compiled step
index.py   an index of the table on the host, rebuilt in the background during training
scann.py   search = scann: an index from the ScaNN library
"""

NOBODY = -1  # an empty exemplar slot: padding, or a duplicate of another slot
