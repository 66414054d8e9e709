"""Retrieval augmented training (RAT): which exemplars count for a batch.

draw.py    the M exemplars of a step
exact.py   the K nearest in the table of latent means, inside the jitted step
scann.py   the same from a ScaNN index on the host
select.py  candidates -> K neighbours -> one union for the batch, and the table's update
"""

NOBODY = -1  # an exemplar slot that holds nothing: padding, or a duplicate of another slot
