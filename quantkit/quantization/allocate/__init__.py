"""Allocate formats within a budget: measure sensitivities, predict costs, choose formats."""
