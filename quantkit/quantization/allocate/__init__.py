"""Formats for a budget: measure sensitivities, predict costs, choose a format for each group of linears."""
