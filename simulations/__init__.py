"""Studies: what to run, what to compare, what to plot."""
