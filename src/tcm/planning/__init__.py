"""From a data set, this machine and a budget to a recipe."""
