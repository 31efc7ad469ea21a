"""Studies: what to run, what to compare, what to plot.

==========  ===================================================================
study       what a study file says, and whether it can be run
running     its runs, one after another; those that are finished are not repeated
scoring     from run folders to one table, with paired intervals
tables      tables
drawing     figures
command     what the two commands share
compare     methods side by side: ``python -m simulations.compare STUDY``
ablate      one setting at a time: ``python -m simulations.ablate STUDY``
==========  ===================================================================
"""
